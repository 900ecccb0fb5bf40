"""The compiled pieces on their own: vector operations on lanes, hashed rows, packed records, candidates."""

import ctypes
import faulthandler
import os
import signal

import numpy as np
import pytest
from guard_pages import beside_guard

from hf_xmc import kernels_search as kernels
from hf_xmc.simd import (
    HEADER,
    LANES,
    compiled,
    lane_add,
    lane_add_run,
    lane_dot,
    lane_dot_float,
    lane_dot_int8,
    lane_dot_run,
    prefetch,
)


@compiled
def run_dot(rows, values, begin, end, weights, out):
    lane_dot(rows, values, begin, end, weights, out)


@compiled
def run_add(rows, values, begin, end, weights, delta):
    lane_add(rows, values, begin, end, weights, delta)


@compiled
def run_dense(values, begin, end, weights, first_row, out, add):
    if add:
        lane_add_run(values, begin, end, weights, first_row, out)
    else:
        lane_dot_run(values, begin, end, weights, first_row, out)


@compiled
def run_packed(rows, values, begin, end, records, out, quantized):
    for p in range(begin, end):
        prefetch(records, np.int64(rows[p]))
    if quantized:
        lane_dot_int8(rows, values, begin, end, records, out)
    else:
        lane_dot_float(rows, values, begin, end, records, out)


@compiled
def run_select(scores, nodes, limit):
    candidates = np.empty(scores.shape[0], dtype=np.uint64)
    bits = scores.view(np.uint32)
    for i in range(scores.shape[0]):
        candidates[i] = kernels.candidate_of(bits[i], nodes[i])
    kernels.select(candidates, limit)
    best_scores, best_nodes = np.empty(limit, np.float32), np.empty(limit, np.int64)
    kernels._write_beam(candidates[:limit], best_scores.view(np.uint32), best_nodes)
    return best_scores, best_nodes


SPANS = [(0, 0), (0, 1), (2, 4), (1, 8), (3, 20), (0, 21)]


@pytest.fixture(params=["begin", "end"])
def guarded(request):
    """Puts arrays beside memory that ends the process if an intrinsic reads or writes it: they do not check bounds."""
    return lambda array: beside_guard(array, request.param)


@pytest.fixture
def lanes(guarded):
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=21).astype(np.float32), rng.normal(size=(30, LANES)).astype(np.float32)
    return guarded(values), guarded(weights), rng


@pytest.mark.parametrize("edge", ["begin", "end"])
def test_guards(edge):
    array = beside_guard(np.arange(100, dtype=np.int32), edge)
    address = array.ctypes.data + (array.nbytes if edge == "end" else -1)
    child = os.fork()
    if child == 0:
        faulthandler.disable()  # of pytest, which would report the expected error
        ctypes.string_at(address, 1)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
@pytest.mark.parametrize(("begin", "end"), SPANS)
def test_lane_dot_and_add(lanes, guarded, index_dtype, begin, end):
    values, weights, rng = lanes
    # The first and the last row are among them.
    rows = guarded(np.append(rng.permutation(28)[:19] + 1, [0, 29]).astype(index_dtype))
    out = guarded(rng.normal(size=LANES).astype(np.float32))
    expected = out.astype(np.float64)
    for p in range(begin, end):
        expected += float(values[p]) * weights[rows[p]]
    run_dot(rows, values, begin, end, weights, out)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)

    changed = guarded(weights)
    run_add(rows, values, begin, end, changed, out)
    for row in range(30):
        places = [p for p in range(begin, end) if rows[p] == row]
        np.testing.assert_allclose(
            changed[row], weights[row] + sum(values[p] * out for p in places), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize(("begin", "end"), SPANS)
@pytest.mark.parametrize("at_end", [False, True])
def test_lane_operations_on_consecutive_rows(lanes, guarded, begin, end, at_end):
    values, weights, rng = lanes
    first = 30 - (end - begin) if at_end else 0
    out = guarded(np.zeros(LANES, dtype=np.float32))
    run_dense(values, begin, end, weights, first, out, False)
    np.testing.assert_allclose(out, values[begin:end] @ weights[first : first + end - begin], rtol=1e-5, atol=1e-5)
    changed = guarded(weights)
    delta = guarded(rng.normal(size=LANES).astype(np.float32))
    run_dense(values, begin, end, changed, first, delta, True)
    expected = weights.copy()
    expected[first : first + end - begin] += np.outer(values[begin:end], delta)
    np.testing.assert_allclose(changed, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(("begin", "end"), SPANS)
def test_lane_dot_with_packed_records(lanes, guarded, quantized, begin, end):
    values, weights, rng = lanes
    records = np.zeros((30, HEADER + LANES * (1 if quantized else 4)), dtype=np.int8)
    if quantized:
        records[:, HEADER:] = rng.integers(-127, 128, (30, LANES))
        weights = records[:, HEADER:].astype(np.float64)
    else:
        records.view(np.float32)[:, HEADER // 4 :] = weights
    rows = guarded(np.append(rng.integers(0, 30, 19), [0, 29]))
    out = guarded(np.zeros(LANES, dtype=np.float32))
    run_packed(rows, values, begin, end, guarded(records), out, quantized)
    np.testing.assert_allclose(out, values[begin:end] @ weights[rows[begin:end]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 100, 5000])
def test_hashed_rows_are_all_found_again(count):
    features = np.random.default_rng(count).permutation(max(10 * count, 1))[:count].astype(np.int32)
    bits = kernels.bucket_bits(count)
    assert 2 * 2**bits >= count and (bits == 0 or 2**bits < count)
    order, starts = kernels.hash_order(features, bits)
    assert sorted(order.tolist()) == list(range(count))
    assert len(starts) == 2**bits + 1 and starts[0] == 0 and starts[-1] == count and (np.diff(starts) >= 0).all()
    bucket = [kernels._bucket(feature, bits) for feature in features[order]]
    assert bucket == np.repeat(np.arange(2**bits), np.diff(starts)).tolist()
    if count > 50:
        assert np.diff(starts).max() < 16


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_buckets_of_the_largest_feature_ids(index_dtype):
    for feature in (0, 1, 2**31 - 1):
        for bits in (0, 1, 20):
            assert kernels._bucket(index_dtype(feature), bits) == ((feature * 2654435769) % 2**32) >> (32 - bits)


def test_quantisation_error():
    rng = np.random.default_rng(1)
    for row in (rng.normal(size=LANES), rng.normal(size=LANES) * 1e-6, np.eye(LANES)[3] * 7, np.zeros(LANES)):
        row = row.astype(np.float32)
        codes = np.full(LANES, 99, dtype=np.int8)
        scale = kernels.quantize(row, codes)
        assert scale > 0
        assert np.abs(codes * np.float64(scale) - row).max() <= scale / 2 * (1 + 1e-5)
        assert (codes[row == 0] == 0).all()
        assert np.abs(codes).max() == (127 if row.any() else 0)


@pytest.mark.parametrize("limit", [1, 2, 7, 40])
def test_select_finds_the_best_whatever_the_order_of_arrival(limit):
    rng = np.random.default_rng(2)
    scores = rng.choice(np.array([-8, -1.5, -0.0, 0.25, 3], np.float32), 40)  # ties: the lower node is better
    nodes = rng.choice(1 << 31, 40, replace=False)
    expected = sorted(zip((-scores).tolist(), nodes.tolist()))[:limit]
    for _ in range(5):
        arrival = rng.permutation(40)
        best_scores, best_nodes = run_select(scores[arrival], nodes[arrival], limit)
        found = list(zip((-best_scores).tolist(), best_nodes.tolist()))
        assert sorted(found) == expected
        assert found[-1] == expected[-1]
