"""Questions about the project, each with the page of the guide that answers it."""

QUESTIONS = (
    ("How do I test my program without a GPU?", "guide/cuda.md"),
    ("What happens to my arrays when the worker process is killed?", "guide/failures.md"),
    ("How do I write a kernel of my own from an expression?", "guide/jit.md"),
    ("How can requests of many clients be put together into one batch?", "guide/batcher.md"),
    ("How do I draw random numbers that are normally distributed?", "guide/random.md"),
    ("How do I compute a fast Fourier transform?", "guide/transforms.md"),
    ("How do I solve a system with a sparse matrix?", "guide/sparse.md"),
    ("How do I get the derivative of a function?", "guide/gradients.md"),
    ("What is a supervisor, and when does it restart an actor?", "guide/supervision.md"),
    ("How do I keep the state of an entity when its node dies?", "guide/cluster.md"),
    ("Which metrics does Prometheus get?", "guide/telemetry.md"),
    ("How do I serve a model with FastAPI?", "guide/serve_a_model.md"),
    ("How do I limit the rate of calls of each client?", "guide/limits.md"),
    ("How do I use several GPUs of one machine?", "guide/many_devices.md"),
    ("How do I record operations and replay them elsewhere?", "guide/replay.md"),
    ("How do I stream text from a language model token by token?", "guide/generate.md"),
    ("How do I train a model on several devices?", "guide/training.md"),
    ("How do I use this in a Jupyter notebook?", "guide/notebook.md"),
    ("How do I put the service into a container?", "guide/deploy.md"),
    ("Does a worker process share memory with my program?", "guide/isolation.md"),
)
