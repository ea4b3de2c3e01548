"""What crosses between application and worker, and how: channel, frames, encoding."""
