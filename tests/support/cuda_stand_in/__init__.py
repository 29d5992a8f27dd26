"""A CUDA device for machines without one, for tests of all that the product does on a device.

Its tensors say that they are on cuda:0 and hold their data on the host. It fails where CUDA fails:
where devices are mixed, where a capture waits for the device, where a graph's output is read after
a later replay. It counts what costs time on a device: waits of the host, copies from memory that is
not pinned, launches, captures and replays.

    def test_...(cuda_stand_in: Device) -> None:    # the fixture; see `Device` and `Counts`
        engine = build_engine(wrap_model(model.to("cuda")))
        with cuda_stand_in.counted() as counts:
            engine.generate(prompt)
        assert counts.replays == ...

An operation outside of a capture is done at once, by torch on the host. In a capture it is done for
its shapes, and undone when the capture ends. A replay does the operations again on the same memory.
Before it, memory that was allocated in captures of the same pool holds NaN and huge numbers.

It cannot show:

- Triton's kernels, flash kernels and CUDA's own rounding. It says that it is too old for the first
  two (compute capability 7.5), so that attention is torch's own.
- Random numbers of a CUDA device. The device has a generator of its own, which draws as the host's
  does.
- autocast to lower precision: it has no effect on these tensors.
- The order of streams. All is done at once, on whichever stream; only a copy to the host that
  nobody waits for is late, and graphs of one pool are refused on streams that do not wait for each
  other. A thread's capture takes all that the thread does.
- Memory: what is free is a number that the test sets. Nothing is added up, and nothing is
  fragmented.
- Time.
- torch.compile, NCCL, several devices, other libraries that call CUDA by themselves.
- Tensors that C++ makes on the device in a thread that is older than the stand-in.
"""

from support.cuda_stand_in.install import installed
from support.cuda_stand_in.state import Counts, Device, Memory, Wait

__all__ = ["Counts", "Device", "Memory", "Wait", "installed"]
