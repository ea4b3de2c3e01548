"""Messages between application and worker: channel, frames, encoding."""
