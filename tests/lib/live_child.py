"""A trainer in its own process that trains as many steps as the test asks for.

    python -c 'import live_child; live_child.main()' RUN [PORT FOLDER]

PORT and FOLDER: where it serves its metrics, and where it records them for TensorBoard.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from processes import PYTHONPATH, start_python


@contextmanager
def child(*arguments: object, **environment: str) -> Iterator[tuple[subprocess.Popen[str], Callable[[int], Any]]]:
    """Yield a trainer in its own process, and a function that trains steps and returns the last step and the saves."""
    command = [sys.executable, "-c", "import live_child; live_child.main()", *map(str, arguments)]
    settings = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_WAIT_POLICY": "passive", **environment}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with start_python(command, env=settings, **pipes) as process:

        def go(steps: int) -> Any:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        try:
            yield process, go
        finally:
            process.kill()


def main() -> None:
    import torch.distributed as dist

    import ckpt
    import toy
    from ckpt.metrics import Metrics

    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("gloo")
    run, *served = sys.argv[1:]
    metrics = Metrics(prometheus_port=int(served[0]), tensorboard=served[1], every_s=0.2) if served else None
    state = toy.build()
    cp = ckpt.Checkpointer(state, ckpt.Tier(run, every=10), options=ckpt.Options(metrics=metrics))
    step = cp.restore(default=0)
    for line in sys.stdin:
        for _ in range(int(line)):
            toy.train_step(state)
            step += 1
            save = cp.step(step)
        assert save is not None
        save.wait_staged(30.0)
        cp.wait(30.0)
        os.write(1, (json.dumps({"step": step, "saves": cp.stats.saves}) + "\n").encode())
    cp.close()
    os._exit(0)
