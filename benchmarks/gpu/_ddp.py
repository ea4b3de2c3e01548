"""The GPT of `training.py` by PyTorch's DistributedDataParallel: prints tokens a second as JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
torch: Any = import_module("torch")
distributed: Any = import_module("torch.distributed")
multiprocessing: Any = import_module("torch.multiprocessing")


def run(rank: int, ranks: int, rows: int, steps: int, is_mixed: int) -> None:
    """Train on one rank."""
    models: Any = import_module("gpt_model")  # beside the examples
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", rank=rank, world_size=ranks)
    torch.manual_seed(0)
    sizes = {"layers": 12, "width": 768, "heads": 12, "length": 1024, "vocabulary": 50304}
    # Parameters of float32 and a model that computes in bfloat16 where it may; or all of it in bfloat16.
    model = models.Gpt(**sizes).to("cuda", torch.float32 if is_mixed else torch.bfloat16)
    wrapped = torch.nn.parallel.DistributedDataParallel(
        model, device_ids=[rank], gradient_as_bucket_view=True
    )
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    began = 0.0
    for number in range(steps + 5):
        if number == 5:
            torch.cuda.synchronize()
            began = time.perf_counter()
        ids = np.random.default_rng((1, number)).integers(0, 50304, (rows * ranks, 1025))
        mine = torch.from_numpy(ids[rank * rows : (rank + 1) * rows]).cuda()
        with torch.autocast("cuda", torch.bfloat16, enabled=bool(is_mixed)):
            loss = models.cross_entropy(wrapped, mine)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    torch.cuda.synchronize()
    if rank == 0:
        print(json.dumps({"tokens": rows * ranks * 1024 * steps / (time.perf_counter() - began)}), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    numbers = tuple(map(int, sys.argv[1:5]))
    multiprocessing.spawn(run, numbers, nprocs=numbers[0])
