"""`--nproc N`: the same command in N processes on this machine, by torch's own launcher.

Several machines, or other launchers: `torchrun` and `deepspeed` set the same variables (RANK,
LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) and start `medusa-kit train` themselves.
"""

import ctypes
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence

from medusa_kit import console
from medusa_kit.errors import ConfigError

# After Ctrl-C the processes save a checkpoint. The launcher ends those that take longer; its own
# limit of 30 seconds is too short for large models. A torch that does not know this keeps to it.
SECONDS_TO_SAVE = "900"
LAUNCHER = "MEDUSA_KIT_LAUNCHER"  # its process, for those that it starts
PR_SET_PDEATHSIG = 1
SIGNALLED = 128  # an exit code above it: ended by the signal of that number


def launch(arguments: Sequence[str], processes: int) -> int:
    """Run `medusa-kit ARGUMENTS` in so many processes; the exit code of the first that failed, or
    the one that shells give a command that SIGTERM or the like ended.

    When one dies, the others are stopped: they would wait for it for ever. Raises ConfigError when
    a launcher is at work already, KeyboardInterrupt once the processes have ended after Ctrl-C.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"--nproc {processes} inside a launcher that started {os.environ['WORLD_SIZE']} "
            "processes",
            hint="leave --nproc to torchrun or deepspeed, or start medusa-kit without them",
        )
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SECONDS_TO_SAVE)
    os.environ[LAUNCHER] = str(os.getpid())
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The launcher sets handlers of its own and leaves them.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    logging.disable(logging.ERROR)  # what the launcher logs is said below, in a line
    with tempfile.TemporaryDirectory() as folder:
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=processes, max_restarts=0, run_id="train",
            rdzv_backend="c10d", rdzv_endpoint="localhost:0", local_addr="localhost",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )  # fmt: skip
        try:
            elastic_launch(config, sys.executable)("-m", "medusa_kit", *arguments)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            return _failed(rank, processes, failure.exitcode)
        except SignalException as stopped:
            if stopped.sigval == signal.SIGINT:
                raise KeyboardInterrupt from stopped
            console.warn(f"stopped by {stopped.sigval.name}, with the {processes} processes")
            return SIGNALLED + stopped.sigval
        finally:
            del os.environ[LAUNCHER]
            logging.disable(logging.NOTSET)
            for number, handler in handlers.items():
                if handler is not None:  # else it was not set from Python
                    signal.signal(number, handler)
    return 0


def end_with_launcher() -> None:
    """Let this process get SIGTERM when its launcher dies, even by SIGKILL: on Linux the kernel
    sends it. Otherwise it may wait for the others for as long as their network's timeout. Without
    effect in a process that `launch` has not started."""
    launcher = os.environ.get(LAUNCHER)
    if launcher is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(launcher):  # it died before
        os.kill(os.getpid(), signal.SIGTERM)


def _failed(rank: int, processes: int, code: int) -> int:
    killed = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
    console.warn(f"process {rank} of {processes} {killed}; the others are stopped")
    return code if code > 0 else 1
