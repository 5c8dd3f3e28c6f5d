"""``hash`` and ``xxhash64``: Murmur3 and XXH64 as Spark computes them, one whole column after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.expressions.evaluation import Evaluator, Frame, Value, broadcast, function
from ckpt_runtime.expressions.nodes import Call
from ckpt_runtime.expressions.types import SparkType, UnsupportedExpressionError, decimal_of

_Array: TypeAlias = "np.ndarray[Any, Any]"
_Hash: TypeAlias = Callable[[pa.Array, _Array], _Array]


class _Murmur3:
    """Murmur3 in its form of 32 bits; states are unsigned integers of 32 bits."""

    state = np.uint32

    @classmethod
    def _mixed(cls, state: _Array, key: _Array) -> _Array:
        key = key * np.uint32(0xCC9E2D51)
        mixed: _Array = ((key << np.uint32(15)) | (key >> np.uint32(17))) * np.uint32(0x1B873593)
        state = state ^ mixed
        return ((state << np.uint32(13)) | (state >> np.uint32(19))) * np.uint32(5) + np.uint32(0xE6546B64)

    @staticmethod
    def _finished(state: _Array, length: _Array | np.uint32) -> _Array:
        state = state ^ length
        state = (state ^ (state >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        state = (state ^ (state >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        finished: _Array = state ^ (state >> np.uint32(16))
        return finished

    @classmethod
    def integers(cls, values: _Array, seeds: _Array) -> _Array:
        return cls._finished(cls._mixed(seeds, values.view(np.uint32)), np.uint32(4))

    @classmethod
    def longs(cls, values: _Array, seeds: _Array) -> _Array:
        bits = values.view(np.uint64)
        low, high = bits.astype(np.uint32), (bits >> np.uint64(32)).astype(np.uint32)
        return cls._finished(cls._mixed(cls._mixed(seeds, low), high), np.uint32(8))

    @classmethod
    def bytes(cls, texts: _Bytes, seeds: _Array) -> _Array:
        """Hashes words of four bytes, then each remaining byte as a signed number."""
        state = seeds.copy()
        lengths = texts.lengths
        for at in range(0, int(lengths.max(initial=0)) // 4 * 4, 4):
            rows = lengths >= at + 4
            state[rows] = cls._mixed(state[rows], texts.words(rows, np.full(rows.sum(), at), 4).astype(np.uint32))
        whole = lengths // 4 * 4
        for extra in range(3):
            rows = lengths > whole + extra
            last = texts.words(rows, (whole + extra)[rows], 1).astype(np.uint8).view(np.int8).astype(np.int32)
            state[rows] = cls._mixed(state[rows], last.view(np.uint32))
        return cls._finished(state, lengths.astype(np.uint32))


_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)


def _rotated(value: _Array, by: int) -> _Array:
    rotated: _Array = (value << np.uint64(by)) | (value >> np.uint64(64 - by))
    return rotated


class _XxHash64:
    """XXH64; states are unsigned integers of 64 bits."""

    state = np.uint64

    @staticmethod
    def _finished(state: _Array) -> _Array:
        state = (state ^ (state >> np.uint64(33))) * _P2
        state = (state ^ (state >> np.uint64(29))) * _P3
        finished: _Array = state ^ (state >> np.uint64(32))
        return finished

    @staticmethod
    def _with_eight(state: _Array, word: _Array) -> _Array:
        return _rotated(state ^ (_rotated(word * _P2, 31) * _P1), 27) * _P1 + _P4

    @staticmethod
    def _with_four(state: _Array, word: _Array) -> _Array:
        return _rotated(state ^ (word * _P1), 23) * _P2 + _P3

    @classmethod
    def integers(cls, values: _Array, seeds: _Array) -> _Array:
        word = values.view(np.uint32).astype(np.uint64)
        return cls._finished(cls._with_four(seeds + _P5 + np.uint64(4), word))

    @classmethod
    def longs(cls, values: _Array, seeds: _Array) -> _Array:
        return cls._finished(cls._with_eight(seeds + _P5 + np.uint64(8), values.view(np.uint64)))

    @classmethod
    def bytes(cls, texts: _Bytes, seeds: _Array) -> _Array:
        lengths = texts.lengths
        state = seeds + _P5
        stripes = lengths // 32 * 32
        long_ = stripes > 0
        if long_.any():
            state[long_] = cls._of_stripes(texts, seeds, long_, stripes)
        state = state + lengths.astype(np.uint64)
        done = stripes.copy()
        for size, mix in ((8, cls._with_eight), (4, cls._with_four)):
            while (rows := lengths >= done + size).any():
                state[rows] = mix(state[rows], texts.words(rows, done[rows], size))
                done[rows] += size
        while (rows := lengths > done).any():
            state[rows] = _rotated(state[rows] ^ (texts.words(rows, done[rows], 1) * _P5), 11) * _P1
            done[rows] += 1
        return cls._finished(state)

    @staticmethod
    def _of_stripes(texts: _Bytes, seeds: _Array, long_: _Array, stripes: _Array) -> _Array:
        lanes: list[_Array] = [seeds + _P1 + _P2, seeds + _P2, seeds.copy(), seeds - _P1]
        for at in range(0, int(stripes.max()), 32):
            rows = stripes >= at + 32
            for number, lane in enumerate(lanes):
                word = texts.words(rows, np.full(rows.sum(), at + 8 * number), 8)
                lane[rows] = _rotated(lane[rows] + word * _P2, 31) * _P1
        kept = [lane[long_] for lane in lanes]
        state = _rotated(kept[0], 1) + _rotated(kept[1], 7) + _rotated(kept[2], 12) + _rotated(kept[3], 18)
        for each in kept:
            state = (state ^ (_rotated(each * _P2, 31) * _P1)) * _P1 + _P4
        return state


class _Bytes:
    """Texts as one array of bytes, with the start and the length of each."""

    def __init__(self, array: pa.Array) -> None:
        filled = pc.fill_null(array.cast(pa.binary()), b"")
        filled = pa.concat_arrays([filled])
        offsets = np.frombuffer(filled.buffers()[1], np.int32, len(filled) + 1, filled.offset * 4)
        data = filled.buffers()[2]
        self._data = np.concatenate([np.frombuffer(data or b"", np.uint8), np.zeros(8, np.uint8)])
        self._starts = offsets[:-1].astype(np.int64)
        self.lengths = np.diff(offsets).astype(np.int64)

    def words(self, rows: _Array, positions: _Array, size: int) -> _Array:
        """Returns the little-endian number of ``size`` bytes at a position of each of the rows."""
        at = self._starts[rows] + positions
        word = np.zeros(len(at), np.uint64)
        for byte in range(size):
            word |= self._data[at + byte].astype(np.uint64) << np.uint64(8 * byte)
        return word


def _hash_of(type_: SparkType, algorithm: type[_Murmur3 | _XxHash64]) -> _Hash:
    """Returns a function that updates the hashes so far with the values of a column."""
    if isinstance(type_, dict):
        return _nested_hash(type_, algorithm)
    if type_ == "void":
        return lambda array, seeds: seeds
    if type_ in ("string", "binary"):
        return _skipping_nulls(lambda array, seeds: algorithm.bytes(_Bytes(array), seeds))
    if found := decimal_of(type_):
        if found[0] > 18:
            return _skipping_nulls(lambda array, seeds: algorithm.bytes(_unscaled_bytes(array, found[1]), seeds))

        def decimals(array: pa.Array, seeds: _Array) -> _Array:
            unscaled = [0 if value is None else int(value.scaleb(found[1])) for value in array.to_pylist()]
            return algorithm.longs(np.array(unscaled, np.int64), seeds)

        return _skipping_nulls(decimals)
    if type_ in ("boolean", "byte", "short", "integer", "date"):
        return _skipping_nulls(
            lambda array, seeds: algorithm.integers(_numbers(array.cast(pa.int32())).astype(np.int32), seeds)
        )
    if type_ == "float":
        return _skipping_nulls(lambda array, seeds: algorithm.integers(_bits(array, np.float32, np.int32), seeds))
    if type_ == "double":
        return _skipping_nulls(lambda array, seeds: algorithm.longs(_bits(array, np.float64, np.int64), seeds))
    if type_ in ("long", "timestamp", "timestamp_ntz") or type_.startswith("interval day"):
        return _skipping_nulls(lambda array, seeds: algorithm.longs(_numbers(array.cast(pa.int64())), seeds))
    raise UnsupportedExpressionError(f"a hash of the type {type_}")


def _numbers(array: pa.Array) -> _Array:
    return np.ascontiguousarray(array.fill_null(0).to_numpy(zero_copy_only=False))


def _bits(array: pa.Array, kind: type, bits: type) -> _Array:
    """Returns numbers by their bits: all NaN have the same, and the two zeros."""
    numbers = array.fill_null(0.0).to_numpy(zero_copy_only=False).astype(kind) + kind(0)
    numbers[np.isnan(numbers)] = np.nan
    return np.ascontiguousarray(numbers).view(bits)


def _unscaled_bytes(array: pa.Array, scale: int) -> _Bytes:
    """Returns decimals as the bytes of Java's big integers: the fewest in two's complement, the highest one first."""
    values = []
    for value in array.to_pylist():
        number = 0 if value is None else int(value.scaleb(scale))
        size = (number if number >= 0 else ~number).bit_length() // 8 + 1
        values.append(number.to_bytes(size, "big", signed=True))
    return _Bytes(pa.array(values, pa.binary()))


def _skipping_nulls(compute: _Hash) -> _Hash:
    def run(array: pa.Array, seeds: _Array) -> _Array:
        hashed = compute(array, seeds)
        if not array.null_count:
            return hashed
        return np.where(array.is_valid().to_numpy(zero_copy_only=False), hashed, seeds)

    return run


def _nested_hash(type_: dict[str, Any], algorithm: type[_Murmur3 | _XxHash64]) -> _Hash:
    if type_["type"] == "struct":
        fields = [_hash_of(field["type"], algorithm) for field in type_["fields"]]

        def structs(array: pa.Array, seeds: _Array) -> _Array:
            for hash_, child in zip(fields, array.flatten(), strict=True):
                seeds = hash_(child, seeds)
            return seeds

        return structs
    if type_["type"] != "array":
        raise UnsupportedExpressionError(f"a hash of the type {type_['type']}")
    element = _hash_of(type_["elementType"], algorithm)

    def arrays(array: pa.Array, seeds: _Array) -> _Array:
        """The k-th step takes the k-th element of each array that has one."""
        seeds = seeds.copy()
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]) if len(lengths) else lengths
        flat = array.flatten()
        for at in range(int(lengths.max(initial=0))):
            rows = lengths > at
            seeds[rows] = element(flat.take(pa.array(starts[rows] + at)), seeds[rows])
        return seeds

    return arrays


@function("Murmur3Hash", "XxHash64")
def _hash(call: Call, arguments: Sequence[Evaluator]) -> Evaluator:
    algorithm = _Murmur3 if call.function == "Murmur3Hash" else _XxHash64
    hashes = [_hash_of(argument.type, algorithm) for argument in call.arguments]
    seed = int(call.settings.get("seed", 42))
    result: type = np.int32 if call.function == "Murmur3Hash" else np.int64

    def run(frame: Frame) -> Value:
        state = np.full(frame.length, seed, algorithm.state)
        with np.errstate(over="ignore"):
            for hash_, argument in zip(hashes, arguments, strict=True):
                state = hash_(broadcast(argument(frame), frame.length), state)
        return pa.array(state.view(result))

    return run
