"""Files of segments: as this version has them, plain safetensors, and made and read without a copy."""

from __future__ import annotations

import ast
import doctest
import inspect
import json
import tracemalloc

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from mlx_vlm_cacheplus.core import (
    disk_arrays,
    disk_safetensors,
    disk_sections,
    disk_segment,
)
from mlx_vlm_cacheplus.core.disk_format import from_file, to_file
from mlx_vlm_cacheplus.core.disk_safetensors import header_of, parse_header, read_head
from mlx_vlm_cacheplus.core.disk_segment import (
    HOST,
    HostArray,
    HostPart,
    HostSegment,
    HostState,
)

PLAN = {
    "module": "mlx_vlm.models.cache",
    "class": "ArraysCache",
    "explicit": False,
    "content": {"list": [{"array": 0}, {"value": None}]},
}
# Tokens 2 to 5 of a path, as this version of the format has them.
WRITTEN = (
    b"\xd0\x02\x00\x00\x00\x00\x00\x00"
    b'{"__metadata__":{"version":"2","path":"the path","row":"{\\"number\\": 1}",'
    b'"start":"2","stop":"5","states":"[{\\"module\\": \\"mlx_vlm.models.cache\\", '
    b'\\"class\\": \\"ArraysCache\\", \\"explicit\\": false, \\"content\\": '
    b'{\\"list\\": [{\\"array\\": 0}, {\\"value\\": null}]}}]","part":"drafter",'
    b'"sections":"[[\\"kv\\", 12, \\"ef5cee1cdd95cf319b6f9446d76df033\\"], '
    b'[\\"state\\", 4, \\"93057c542f432ef14d8249a3f8d1cdd1\\"], '
    b'[\\"part\\", 4, \\"5faae96c1761049952f9ec7404956f3f\\"]]"},'
    b'"kv.0.0":{"dtype":"BF16","shape":[1,2,3,1],"data_offsets":[0,12]},'
    b'"state.0.0":{"dtype":"F32","shape":[1,1],"data_offsets":[12,16]},'
    b'"part.0.0":{"dtype":"U8","shape":[1,1,3,1],"data_offsets":[16,19]},'
    b'"part.pending":{"dtype":"I8","shape":[1,1,1],"data_offsets":[19,20]}}   '
    b"\x00\x00\x01\x00\x08\x00\x02\x00\x03\x00\t\x00\x00\x00\xe0@\x01\x02\x03\x05"
)


def array(values, dtype, *shape):
    return HostArray(np.array(values, HOST[dtype]).reshape(shape), dtype)


def segments():
    """What is in ``WRITTEN``, as two segments that follow each other."""
    return [
        HostSegment(
            *(2, 4, [(array(range(4), "BF16", 1, 2, 2, 1),)]),
            part=HostPart("drafter", [(array([1, 2], "U8", 1, 1, 2, 1),)]),
        ),
        HostSegment(
            *(4, 5, [(array([8, 9], "BF16", 1, 2, 1, 1),)]),
            [HostState(PLAN, [array([7], "F32", 1, 1)])],
            HostPart(
                "drafter",
                [(array([3], "U8", 1, 1, 1, 1),)],
                array([5], "I8", 1, 1, 1),
            ),
        ),
    ]


def written(parts, path="the path", row='{"number": 1}'):
    content, nbytes = to_file(parts, path, row)
    out = b"".join(bytes(chunk) for chunk in content)
    assert len(out) == nbytes
    return out


def test_files_are_written_as_this_version_has_them():
    assert written(segments()) == WRITTEN


def test_files_that_were_written_before_are_read():
    found = from_file(memoryview(WRITTEN))
    assert (found.start, found.stop) == (2, 5)
    assert found.metadata["path"] == "the path"
    ((keys,),) = found.spans
    assert (keys.dtype, keys.data.ravel().tolist()) == ("BF16", [0, 1, 8, 2, 3, 9])
    (state,) = found.states
    assert state.plan == PLAN and state.arrays[0].data.tolist() == [[7.0]]
    assert found.part.name == "drafter" and found.part.pending.data.item() == 5
    assert found.part.spans[0][0].data.ravel().tolist() == [1, 2, 3]


def test_the_library_reads_what_is_written():
    """Its reader checks offsets and shapes too."""
    arrays = dict(safetensors.deserialize(WRITTEN))
    assert arrays["kv.0.0"]["dtype"] == "BF16"
    assert arrays["kv.0.0"]["shape"] == [1, 2, 3, 1]
    assert bytes(arrays["state.0.0"]["data"]) == np.float32(7).tobytes()


def test_what_the_library_writes_is_read():
    arrays = {
        name: np.arange(6).reshape(2, 3).astype(host)
        for name, host in HOST.items()
        if name != "BF16"
    }
    content = safetensors.numpy.save(arrays, {"key": "value"})
    header = header_of(content)
    assert header.metadata == {"key": "value"}
    for name, expected in arrays.items():
        place = header.arrays[name]
        assert (place.dtype, place.shape) == (name, (2, 3))
        assert content[place.start : place.stop] == expected.tobytes()


def test_another_version_is_no_segment():
    other = WRITTEN.replace(b'"version":"2"', b'"version":"9"')
    with pytest.raises(ValueError, match="version 9"):
        from_file(memoryview(other))


def with_header(header):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


def spec(dtype="U8", shape=(8,), offsets=(0, 8)):
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x05\x00",
        bytes(8),
        WRITTEN[:100],
        (1 << 63).to_bytes(8, "little") + b"{}",
        with_header(b"\xff\xfe"),
        with_header([1]),
        with_header(1),
        with_header({"__metadata__": 1}),
        with_header({"a": 1}),
        with_header({"a": {"dtype": "U8", "shape": [8]}}),
        with_header(spec(offsets=(0, 9))),
        with_header(spec(offsets=(4, 0))),
        with_header(spec(offsets=(-8, 0))),
        with_header(spec(offsets=(0, 4, 8))),
        with_header(spec(shape="x")),
    ],
    ids=lambda content: repr(content[8:30]),
)
def test_what_has_no_header(content):
    with pytest.raises(ValueError):
        header_of(content)
    with pytest.raises(ValueError):
        from_file(memoryview(content))


@pytest.mark.parametrize(
    "array", [spec(dtype="F8"), spec(shape=(7,)), spec(dtype="F32", shape=(1,))]
)
def test_arrays_that_are_none(array):
    sections = json.dumps([["a", 8, ""]])
    metadata = {"version": "2", "start": "0", "stop": "1", "sections": sections}
    content = with_header({"__metadata__": metadata, **array})
    assert header_of(content).metadata == metadata
    with pytest.raises(ValueError):
        from_file(memoryview(content))


def test_a_header_is_read_by_itself():
    """Of a file on disk no more is asked for than its header."""
    asked, place = [], 0

    def read(count):
        nonlocal place
        asked.append(count)
        place += count
        return WRITTEN[place - count : place]

    head = read_head(read, len(WRITTEN))
    assert sum(asked) == len(head) == len(WRITTEN) - 20
    assert parse_header(head, len(WRITTEN)) == header_of(WRITTEN)


def test_neither_way_copies_all():
    """Of 16 arrays one is put together at a time; what is read is looked at in place."""
    tokens, layers = 1 << 12, 8
    parts = [
        HostSegment(
            start,
            start + tokens,
            [
                tuple(
                    HostArray(np.full((1, 1, tokens, 16), start, np.uint16), "BF16")
                    for _ in range(2)
                )
                for _ in range(layers)
            ],
        )
        for start in (0, tokens)
    ]
    one = 2 * tokens * 16 * 2
    content, nbytes = to_file(parts, "")
    tracemalloc.start()
    try:
        assert sum(len(chunk) for chunk in content) == nbytes
        assert tracemalloc.get_traced_memory()[1] < 3 * one
        content = bytearray(b"".join(bytes(chunk) for chunk in content))
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        found = from_file(memoryview(content))
        assert tracemalloc.get_traced_memory()[1] - before < one
    finally:
        tracemalloc.stop()
    content[-1] = 7
    assert found.spans[-1][-1].data[0, 0, -1, -1] >> 8 == 7


def test_both_tables_of_types_have_the_same_names():
    assert list(disk_arrays.DTYPES) == list(HOST)
    for name, dtype in disk_arrays.DTYPES.items():
        assert dtype.size == HOST[name].itemsize


def test_host_memory_knows_no_arrays():
    """What other threads hold and write cannot touch an array by mistake."""
    for module in (disk_segment, disk_safetensors, disk_sections):
        tree = ast.parse(inspect.getsource(module))
        names = [
            getattr(node, "module", None) or node.names[0].name
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
        ]
        assert names and not any(name.startswith("mlx") for name in names)


@pytest.mark.parametrize("module", [disk_safetensors, disk_sections])
def test_doctest(module):
    assert doctest.testmod(module).failed == 0
