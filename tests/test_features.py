"""Features: what is accepted, what is refused, rows and lengths."""

import numpy as np
import pytest
from conftest import refused
from scipy.sparse import coo_matrix, csc_matrix, csr_matrix

from hf_xmc.features import Features, normalize_rows

DENSE = np.array([[3.0, 4.0], [0.0, 0.0], [-1.0, 0.0]])
SPARSE = np.array([[0.0, 2.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [5.0, 0.0, 0.0, 0.0]])


def raw_csr(data, indices, indptr, shape, index_dtype=np.int32):
    """A matrix exactly as given: scipy's constructor would tidy up the index type."""
    matrix = csr_matrix(shape, dtype=np.float32)
    matrix.data = np.asarray(data, dtype=np.float32)
    matrix.indices, matrix.indptr = np.asarray(indices, index_dtype), np.asarray(indptr, index_dtype)
    return matrix


def test_sizes_types_and_formats():
    features = Features(csr_matrix(SPARSE), DENSE)
    assert features.sparse.dtype == features.dense.dtype == np.float32
    assert np.array_equal(features.sparse.toarray(), SPARSE) and np.array_equal(features.dense, DENSE)
    for given, sizes in ((features, (4, 2)), (Features(csr_matrix(SPARSE)), (4, 0)), (Features(None, DENSE), (0, 2))):
        assert len(given) == 3 and (given.num_sparse, given.num_dense) == sizes
    for kind in (csr_matrix, csc_matrix, coo_matrix, np.array):
        assert np.array_equal(Features(kind(SPARSE)).sparse.toarray(), SPARSE)
    dense = np.asfortranarray(DENSE)
    assert Features(None, dense).dense.flags.c_contiguous
    assert np.array_equal(Features(None, dense[::2]).dense, DENSE[::2])
    # Nothing is copied without need.
    sparse, dense = csr_matrix(SPARSE.astype(np.float32)), DENSE.astype(np.float32)
    features = Features(sparse, dense)
    assert features.dense is dense and np.shares_memory(features.sparse.data, sparse.data)


@pytest.mark.parametrize("rows", [slice(1, 3), np.array([2, 0]), np.array([True, False, True]), slice(0, 0)])
def test_rows(rows):
    part = Features(csr_matrix(SPARSE), DENSE)[rows]
    assert np.array_equal(part.sparse.toarray(), SPARSE[rows]) and np.array_equal(part.dense, DENSE[rows])
    assert len(part) == len(DENSE[rows])


def test_rows_after_rows():
    first, second = (Features(csr_matrix(np.full((rows, 3), rows, np.float32)), np.eye(rows, 2)) for rows in (2, 1))
    both = first.followed_by(second)
    np.testing.assert_array_equal(both.sparse.toarray(), [[2, 2, 2], [2, 2, 2], [1, 1, 1]])
    np.testing.assert_array_equal(both.dense, [[1, 0], [0, 1], [1, 0]])
    assert Features(first.sparse).followed_by(Features(second.sparse)).dense is None
    refused("3 sparse and 2 dense.*3 and 0", first.followed_by, Features(second.sparse))


def test_normalized_scales_each_part_and_leaves_zero_rows():
    features = Features(csr_matrix(SPARSE), DENSE).normalized()
    for part, original in ((features.sparse.toarray(), SPARSE), (features.dense, DENSE)):
        for row, source in zip(part, original, strict=True):
            length = np.sqrt((source**2).sum())
            np.testing.assert_allclose(row, source / length if length else source, rtol=1e-6)
    assert np.array_equal(features.normalized().sparse.data, features.sparse.data)
    # Stored zeros, and nothing at all.
    stored = Features(raw_csr([0, 2, 0], [0, 1, 3], [0, 2, 3], (2, 4))).normalized()
    assert np.array_equal(stored.sparse.toarray(), [[0, 1, 0, 0], [0, 0, 0, 0]])
    for empty in (Features(csr_matrix((0, 4)), np.empty((0, 2))), Features(csr_matrix((3, 0)))):
        assert len(empty.normalized()) == len(empty)
    assert len(Features(csr_matrix((0, 4)))) == 0
    # The input is left alone.
    matrix = csr_matrix(SPARSE.astype(np.float32))
    scaled = normalize_rows(matrix)
    assert np.array_equal(matrix.toarray(), SPARSE)
    assert scaled.data.dtype == np.float32 and np.shares_memory(scaled.indices, matrix.indices)


@pytest.mark.parametrize("index_dtype", [np.int32, np.int64])
def test_unsorted_indices_are_sorted_in_a_copy(index_dtype):
    matrix = raw_csr([1, 2, 3], [3, 1, 0], [0, 2, 3], (2, 4), index_dtype)
    assert not matrix.has_sorted_indices and not matrix.has_canonical_format  # scipy remembers both answers
    features = Features(matrix)
    assert features.sparse.indices.tolist() == [1, 3, 0] and features.sparse.data.tolist() == [2, 1, 3]
    np.testing.assert_allclose(features.normalized().sparse.data, [2 / 5**0.5, 1 / 5**0.5, 1], rtol=1e-6)
    assert matrix.indices.tolist() == [3, 1, 0]


@pytest.mark.parametrize("indices", [[0, 2, 2, 1], [0, 1, 3, 1]])
def test_duplicate_indices_name_their_row(indices):
    # Rows 0 (empty), 1, 2 (empty), 3; equal neighbours across a row border are no duplicates.
    doubled = raw_csr([1] * 6, [1, 3, *indices], [0, 0, 2, 2, 6], (4, 4))
    refused("Row 3.*sparse", Features, doubled)
    Features(raw_csr([1] * 4, [1, 3, 3, 1], [0, 2, 3, 4], (3, 4)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_values_that_are_not_finite_name_their_row(value):
    sparse, dense = SPARSE.copy(), DENSE.copy()
    sparse[2, 0] = dense[2, 1] = value
    refused("Row 2.*sparse.*(nan|inf)", Features, csr_matrix(sparse))
    refused("Row 2.*dense", Features, None, dense)


@pytest.mark.parametrize("column", [4, 2**31 - 1, -1])
def test_columns_out_of_range(column):
    refused(r"0\.\.3", Features, raw_csr([1], [column], [0, 1], (1, 4)))


def test_wrong_shapes():
    refused("sparse", Features)
    refused("sparse.* 3 .*dense.* 2", Features, csr_matrix(SPARSE), DENSE[:2])
    refused(r"\(3,\)", Features, None, DENSE[:, 0])


def test_values_are_raised_to_a_power_with_their_signs():
    features = Features(csr_matrix(SPARSE * -1), DENSE)
    raised = features.raised(1.5)
    np.testing.assert_allclose(raised.sparse.toarray(), -(SPARSE**1.5), rtol=1e-6)
    np.testing.assert_array_equal(raised.dense, features.dense)
    assert features.raised(1.0) is features
