"""A GGUF file is checked before anything is mapped: each fault by its message, and thousands of
mutated files, none of which may do anything but pass or raise CheckpointError."""

import os
import random
import struct
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.gguf.tiny_files import tiny_model, write_model

from medusa_kit.base.gguf_files import header as header_module
from medusa_kit.base.gguf_files.check import checked
from medusa_kit.base.gguf_files.tensors import tensors_of
from medusa_kit.base.gguf_files.types import TYPES, UNREAD
from medusa_kit.errors import CheckpointError

gguf = pytest.importorskip("gguf")

MUTATIONS = int(os.environ.get("MEDUSA_KIT_MUTATIONS", "300"))
LENGTH, ALL = struct.Struct("<Q"), 0xFFFFFFFFFFFFFFFF


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "model.gguf"
    write_model(path, "llama", tiny_model("llama", vocab_size=260, num_hidden_layers=1))
    return path.read_bytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def test_a_header_is_read_once_for_the_same_file(
    path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, found = [], header_module._read
    monkeypatch.setattr(header_module, "_read", lambda *given: read.append(given) or found(*given))
    path.write_bytes(whole)
    header_module.read_header(path), header_module.read_header(path)
    assert len(read) == 2, "one that was written just now may change without a trace"
    os.utime(path, ns=(0, 0))
    stamps = iter([("a",), ("a",), ("b",)])
    monkeypatch.setattr(header_module, "settled_stamp", lambda _: next(stamps))
    one, same, other = (header_module.read_header(path) for _ in range(3))
    assert len(read) == 4
    assert one is same
    assert other is not one
    assert other == one


def replaced(raw: bytes, after: bytes, old: bytes, new: bytes) -> bytes:
    """`old`, which follows the text `after`, becomes `new`."""
    at = raw.index(after) + len(after)
    assert raw[at : at + len(old)] == old
    return raw[:at] + new + raw[at + len(old) :]


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def u64(number: int) -> bytes:
    return LENGTH.pack(number)


def test_a_whole_file_passes(path: Path, whole: bytes) -> None:
    path.write_bytes(whole)
    ours = {tensor.name: tensor for tensor in tensors_of(checked(path))}
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(str(path)).tensors}
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].tensor_type == tensor.tensor_type
        assert list(ours[name].shape) == list(tensor.shape)
        assert ours[name].data.dtype == tensor.data.dtype
        assert (ours[name].data == tensor.data).all()


def test_types_are_those_of_the_gguf_package() -> None:
    known = {kind.value: kind for kind in gguf.GGMLQuantizationType}
    for number, kind in TYPES.items():
        assert (kind.name, (kind.numbers, kind.size)) == (
            known[number].name, gguf.GGML_QUANT_SIZES[known[number]],
        )  # fmt: skip
    assert {known[number].name for number in UNREAD if number in known} <= set(UNREAD.values())
    assert set(known) <= set(TYPES) | set(UNREAD), "each is read or refused by its name"


def test_faults_are_told(path: Path, whole: bytes) -> None:
    tensor = b"blk.0.attn_k.weight"  # then 2 dimensions, 64 and 32 numbers, its type and place
    shape = u32(2) + u64(64) + u64(32)
    q, k = b"blk.0.attn_q.weight", b"blk.0.attn_k.weight"
    layers = b"llama.block_count"
    end = whole.index(tensor + shape + u32(0)) + len(tensor + shape) + 4
    place = whole[end : end + 8]
    faults = {
        "begins with b'GGUG'; expected b'GGUF'": b"GGUG" + whole[4:],
        "has version 9; expected 2 or 3": whole[:4] + u32(9) + whole[8:],
        "has version 50331648": whole[:4] + whole[4:8][::-1] + whole[8:],
        f"announces {ALL} tensors": whole[:8] + u64(ALL) + whole[16:],
        f"announces {1 << 40} values": whole[:16] + u64(1 << 40) + whole[24:],
        "is cut off in the number of values": whole[:20],
        "is cut off: its tensor 'output.weight' ends at byte": whole[:-64],
        f"has {ALL} bytes for general.architecture": replaced(
            whole, b"general.architecture" + u32(8), u64(5), u64(ALL)
        ),
        f"announces {1 << 50} entries in 'tokenizer.ggml.tokens'": replaced(
            whole, b"tokenizer.ggml.tokens" + u32(9) + u32(8), u64(260), u64(1 << 50)
        ),
        "an array of type 9; expected numbers or strings": replaced(
            whole, b"tokenizer.ggml.tokens" + u32(9), u32(8), u32(9)
        ),
        "'llama.block_count' of type 77; expected 0 to 12": replaced(
            whole, layers, u32(4), u32(77)
        ),
        "has the tensor 'blk.0.attn_q.weight' twice": whole.replace(k, q, 1),
        "has the value 'general.architecture' twice": whole.replace(
            b"llama.context_length", b"general.architecture"
        ),
        "inside 'token_embd.weight', which ends at byte": replaced(
            whole, tensor + shape + u32(0), place, u64(0)
        ),
        f"at {LENGTH.unpack(place)[0] + 1} of its data; expected a multiple of 32": replaced(
            whole, tensor + shape + u32(0), place, u64(LENGTH.unpack(place)[0] + 1)
        ),
        "type 26, I32, which is not read; expected one of F32": replaced(
            whole, tensor + shape, u32(0), u32(26)
        ),
        "type 99, which is unknown": replaced(whole, tensor + shape, u32(0), u32(99)),
        "with 7 dimensions; expected 1 to 4": replaced(whole, tensor, u32(2), u32(7)),
        "of shape [32, 0]; expected rows": replaced(whole, tensor + u32(2), u64(64), u64(0)),
        "a multiple of 256 numbers for Q4_K": replaced(whole, tensor + shape, u32(0), u32(12)),
        "has llama.block_count 4294967295; expected 1, the layers": replaced(
            whole, layers + u32(4), u32(1), u32(0xFFFFFFFF)
        ),
        "has llama.embedding_length 4096; expected 64": replaced(
            whole, b"llama.embedding_length" + u32(4), u32(64), u32(4096)
        ),
        "has llama.vocab_size 261; expected 260": replaced(
            whole, b"llama.vocab_size" + u32(4), u32(260), u32(261)
        ),
        "has llama.rope.dimension_count 2147483648; expected 1 to": replaced(
            whole, b"llama.rope.dimension_count" + u32(4), u32(16), u32(1 << 31)
        ),
        "is of the architecture 'llaxa'": whole.replace(u64(5) + b"llama", u64(5) + b"llaxa", 1),
        "is of the architecture 'mamba', on which draft tokens": whole.replace(
            u64(5) + b"llama", u64(5) + b"mamba", 1
        ),
    }
    for message, raw in faults.items():
        path.write_bytes(raw)
        with pytest.raises(CheckpointError) as caught:
            checked(path)
        assert message in caught.value.message
        assert path.name in caught.value.message
        assert caught.value.hint


def test_an_empty_file_and_a_folder(path: Path) -> None:
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="begins with b''; expected b'GGUF'"):
        checked(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        checked(path.parent)


def test_zeros_without_end_are_not_walked(path: Path, whole: bytes) -> None:
    """A file with a hole: 4 million empty strings at most, not what the file has room for."""
    start = whole.index(b"tokenizer.ggml.tokens") + 21 + 8
    with path.open("wb") as stream:
        stream.write(whole[:start] + u64(1 << 36))
        stream.truncate(1 << 40)
    with pytest.raises(CheckpointError, match="expected at most 4194304"):
        checked(path)


def outcome(path: Path, raw: bytes) -> bool:
    """Whether the file passes; then all that it says lies inside it."""
    path.write_bytes(raw)
    try:
        model = checked(path)
    except CheckpointError:
        return False
    for tensor in tensors_of(model):
        assert tensor.data.nbytes == tensor.info.size
        assert tensor.info.offset + tensor.info.size <= len(raw)
    return True


def mutated(raw: bytes, chance: random.Random) -> bytes:
    """Cut, or with bytes, fields or pieces changed; mostly in the header."""
    changed = bytearray(raw)
    header = raw.rindex(b"output.weight") + 40
    kind = chance.randrange(6)
    if kind == 0:
        return raw[: chance.randrange(len(raw))]
    for _ in range(chance.choice((1, 1, 2, 8))):
        at, other = chance.randrange(header), chance.randrange(header)
        if kind == 1:
            changed[at] ^= 1 << chance.randrange(8)
        elif kind == 2:
            width = chance.choice((4, 8))
            changed[at : at + width], changed[other : other + width] = (
                changed[other : other + width], changed[at : at + width],
            )  # fmt: skip
        elif kind == 3:
            field = chance.choice((0, 1, ALL, 1 << 31, 1 << 40, 1 << 62, chance.getrandbits(64)))
            changed[at : at + 8] = u64(field)
        elif kind == 4:
            del changed[at : at + chance.randrange(1, 40)]
        else:
            changed[at:at] = changed[other : other + chance.randrange(1, 200)]
    return bytes(changed)


def test_mutated_files_pass_or_are_refused(path: Path, whole: bytes) -> None:
    """`make fuzz-gguf` tries 2,000."""
    passed = sum(
        outcome(path, mutated(whole, random.Random(number))) for number in range(MUTATIONS)
    )
    assert 0 < passed < MUTATIONS / 2, "a changed name or text may pass; most changes may not"


def test_a_file_that_is_refused_takes_no_memory(path: Path, whole: bytes) -> None:
    tracemalloc.start()
    try:
        for number in range(100):
            outcome(path, mutated(whole, random.Random(-number)))
        assert tracemalloc.get_traced_memory()[1] < 30 * len(whole) + 4 * header_module.PIECE
    finally:
        tracemalloc.stop()


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    edits=st.lists(st.tuples(st.integers(0, 1 << 14), st.binary(min_size=1, max_size=12))),
    cut=st.none() | st.integers(0, 1 << 14),
)
def test_any_bytes_anywhere(
    path: Path, whole: bytes, edits: list[tuple[int, bytes]], cut: int | None
) -> None:
    changed = bytearray(whole)
    for at, piece in edits:
        changed[at : at + len(piece)] = piece
    outcome(path, bytes(changed[:cut]))
