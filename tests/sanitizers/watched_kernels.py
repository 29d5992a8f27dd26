"""A pytest plugin: the C++ kernels are compiled with AddressSanitizer and
UndefinedBehaviorSanitizer, so that a test which makes them read or write where nothing is theirs
ends the process.

`make sanitize` preloads the sanitizers' libraries, which Python itself lacks; tensors then lie
between guarded bytes, since torch's allocator is theirs too.
"""

import os

from medusa_kit.infer.cpu.binding import kernels

FLAGS = (
    "-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
)  # fmt: skip

if "libasan" not in os.environ.get("LD_PRELOAD", ""):
    raise RuntimeError("the sanitizers' libraries are not preloaded; hint: make sanitize")
_of_processor = kernels.machine_flags
kernels.machine_flags = lambda isa: (*_of_processor(isa), *FLAGS)
