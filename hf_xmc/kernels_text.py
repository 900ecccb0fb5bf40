"""
The compiled inner loops of [`TfidfFeaturizer`]: text to symbols, symbols to n-grams, n-grams to counts and weights.

Text is an array of code points: concatenated documents with their `bounds`. A *symbol* is a positive number: the
number of a word in the lexicon, or a code point plus one. 0 is a gap that no n-gram spans. An n-gram is a node of a
trie whose keys are exact (`parent node << 32 | symbol`), so there are no collisions, unlike with hashed n-grams.

Lexicon and trie are open-addressed hash tables with rows (key, value). The number of rows is a power of two, at most
half of them are used, and value 0 marks a free row. Words are numbered from 1 and have the code points
`chars[ends[word - 1] : ends[word]]`. Node 0 is the root of the trie.

`tfidf.py` says why no library serves.
"""

from __future__ import annotations

import numpy as np

from .simd import compiled

_SPACE = 33  # symbol of the code point 32
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_SEED = np.uint64(0xCBF29CE484222325)
_HALF = np.uint64(32)
_SYMBOL = np.uint64(0xFFFFFFFF)
_FREE = np.uint64(0)


@compiled
def _home(key, mask):
    """Row at which the search for `key` starts."""
    return np.int64(((key ^ (key >> _HALF)) * _MULTIPLIER) >> _HALF) & mask


@compiled
def resized(table, rows):
    """Returns the table with another number of rows, a power of two."""
    mask = rows - 1
    other = np.zeros((rows, 2), np.uint64)
    for i in range(table.shape[0]):
        if table[i, 1] != _FREE:
            row = _home(table[i, 0], mask)
            while other[row, 1] != _FREE:
                row = (row + 1) & mask
            other[row, 0], other[row, 1] = table[i, 0], table[i, 1]
    return other


@compiled
def _copy(source, start, stop, target, place):
    """Like `target[place : ...] = source[start:stop]`, which takes seconds to compile."""
    for i in range(start, stop):
        target[place + i - start] = source[i]


@compiled
def _extended(array, size):
    """Returns `array` followed by zeros, at least twice as long."""
    other = np.zeros(max(size, 2 * array.shape[0]), array.dtype)
    _copy(array, 0, array.shape[0], other, 0)
    return other


@compiled
def _digest(codes, start, stop):
    digest = _SEED
    for i in range(start, stop):
        digest = (digest ^ np.uint64(codes[i])) * _MULTIPLIER
        digest ^= digest >> _HALF
    return digest


@compiled
def _word_row(table, ends, chars, digest, codes, start, stop):
    """Row of the word `codes[start:stop]`, or the free row where it belongs."""
    mask = table.shape[0] - 1
    row = _home(digest, mask)
    while table[row, 1] != _FREE:
        if table[row, 0] == digest:
            word = np.int64(table[row, 1])
            begin = ends[word - 1]
            same = ends[word] - begin == stop - start
            i = 0
            while same and i < stop - start:
                same = chars[begin + i] == codes[start + i]
                i += 1
            if same:
                return row
        row = (row + 1) & mask
    return row


@compiled
def _add_word(table, ends, chars, word, row, digest, codes, start, stop):
    """Stores the new `word` in the free `row`; returns the lexicon, grown where it was full."""
    begin = ends[word - 1]
    end = begin + stop - start
    if word >= ends.shape[0]:
        ends = _extended(ends, 0)
    if end > chars.shape[0]:
        chars = _extended(chars, end)
    _copy(codes, start, stop, chars, begin)
    ends[word] = end
    table[row, 0] = digest
    table[row, 1] = np.uint64(word)
    if 2 * word > table.shape[0]:
        table = resized(table, 2 * table.shape[0])
    return table, ends, chars


@compiled
def _next_run(codes, start, stop, inside):
    """Returns the next maximal run of code points of the class `inside`; empty at the end."""
    while start < stop and not inside[codes[start]]:
        start += 1
    end = start
    while end < stop and inside[codes[end]]:
        end += 1
    return start, end


@compiled
def read_words(codes, bounds, inside, table, ends, chars, words, learn):
    """
    Returns the symbols of the documents' words (two or more code points of the class `inside`), their bounds and the
    lexicon (`table`, `ends`, `chars`, number of `words`).

    An unknown word is added to the lexicon with `learn`; otherwise it is a gap.
    """
    symbols = np.empty(codes.shape[0] // 2 + 1, np.uint32)
    symbol_bounds = np.zeros(bounds.shape[0], np.int64)
    size = 0
    for document in range(bounds.shape[0] - 1):
        start, stop = bounds[document], bounds[document + 1]
        while start < stop:
            start, end = _next_run(codes, start, stop, inside)
            if end - start >= 2:
                digest = _digest(codes, start, end)
                row = _word_row(table, ends, chars, digest, codes, start, end)
                symbols[size] = table[row, 1]
                if learn and symbols[size] == 0:
                    words += 1
                    symbols[size] = words
                    table, ends, chars = _add_word(table, ends, chars, words, row, digest, codes, start, end)
                size += 1
            start = end
        symbol_bounds[document + 1] = size
    return symbols[:size], symbol_bounds, table, ends, chars, words


@compiled
def read_chars(codes, bounds, inside):
    """Returns the symbols of the characters; each run of the class `inside` is between spaces and before a gap."""
    symbols = np.empty(codes.shape[0] + 3 * (codes.shape[0] + bounds.shape[0]) // 2, np.uint32)
    symbol_bounds = np.zeros(bounds.shape[0], np.int64)
    size = 0
    for document in range(bounds.shape[0] - 1):
        start, stop = bounds[document], bounds[document + 1]
        while start < stop:
            start, end = _next_run(codes, start, stop, inside)
            if end > start:
                symbols[size] = _SPACE
                for i in range(start, end):
                    size += 1
                    symbols[size] = codes[i] + 1
                symbols[size + 1] = _SPACE
                symbols[size + 2] = 0
                size += 3
            start = end
        symbol_bounds[document + 1] = size
    return symbols[:size], symbol_bounds


@compiled
def _find_child(table, parent, symbol):
    """Row of the child of `parent` by `symbol`, or the free row where it belongs."""
    key = np.uint64(parent) << _HALF | np.uint64(symbol)
    mask = table.shape[0] - 1
    row = _home(key, mask)
    while table[row, 1] != _FREE and table[row, 0] != key:
        row = (row + 1) & mask
    return row


@compiled
def _add_child(table, parent, symbol, row, node):
    """Stores the new `node` in the free `row`; returns the table, grown where it was full."""
    table[row, 0] = np.uint64(parent) << _HALF | np.uint64(symbol)
    table[row, 1] = np.uint64(node)
    return resized(table, 2 * table.shape[0]) if 2 * node > table.shape[0] else table


@compiled
def count_ngrams(symbols, bounds, min_n, max_n, whole):
    """
    Returns the trie of the n-grams of `min_n` to `max_n` symbols and, with `whole`, of shorter runs from gap to gap.

    Also returns, per node, the number of documents with it and the number of its occurrences (0 for mere prefixes).
    """
    table, nodes = np.zeros((4096, 2), np.uint64), 1
    documents, occurrences, seen = np.zeros(2048, np.int64), np.zeros(2048, np.int64), np.zeros(2048, np.int64)
    for document in range(bounds.shape[0] - 1):
        begin, stop = bounds[document], bounds[document + 1]
        for first in range(begin, stop):
            opens = whole and (first == begin or symbols[first - 1] == 0)
            node = 0
            for i in range(first, min(first + max_n, stop)):
                if symbols[i] == 0:
                    break
                row = _find_child(table, node, symbols[i])
                child = np.int64(table[row, 1])
                if child == 0:
                    child = nodes
                    table = _add_child(table, node, symbols[i], row, child)
                    nodes += 1
                    if nodes > seen.shape[0]:
                        documents, occurrences = _extended(documents, 0), _extended(occurrences, 0)
                        seen = _extended(seen, 0)
                node = child
                if i - first + 1 >= min_n or (opens and (i + 1 == stop or symbols[i + 1] == 0)):
                    occurrences[node] += 1
                    if seen[node] != document + 1:
                        seen[node] = document + 1
                        documents[node] += 1
    return table, documents[:nodes], occurrences[:nodes]


@compiled
def node_keys(table, nodes):
    """Returns the keys of the trie by node."""
    keys = np.zeros(nodes, np.uint64)
    for row in range(table.shape[0]):
        if table[row, 1] != _FREE:
            keys[table[row, 1]] = table[row, 0]
    return keys


@compiled
def merge_words(table, ends, chars, words, other_ends, other_chars, other_words):
    """Adds the words of another lexicon. Returns the lexicon and the new numbers of these words."""
    numbers = np.zeros(other_words + 1, np.uint32)
    for word in range(1, other_words + 1):
        start, stop = other_ends[word - 1], other_ends[word]
        digest = _digest(other_chars, start, stop)
        row = _word_row(table, ends, chars, digest, other_chars, start, stop)
        numbers[word] = table[row, 1]
        if numbers[word] == 0:
            words += 1
            numbers[word] = words
            table, ends, chars = _add_word(table, ends, chars, words, row, digest, other_chars, start, stop)
    return table, ends, chars, words, numbers


@compiled
def find_words(table, ends, chars, other_ends, other_chars, other_words):
    """Returns the numbers in a lexicon of the words of another one; 0 for unknown words."""
    numbers = np.zeros(other_words + 1, np.uint32)
    for word in range(1, other_words + 1):
        start, stop = other_ends[word - 1], other_ends[word]
        digest = _digest(other_chars, start, stop)
        numbers[word] = table[_word_row(table, ends, chars, digest, other_chars, start, stop), 1]
    return numbers


@compiled
def merge_ngrams(table, documents, occurrences, nodes, keys, other_documents, other_occurrences, numbers):
    """Adds the nodes and counts of another trie; `numbers`, if not empty, renumbers its symbols."""
    places = np.zeros(keys.shape[0], np.int64)
    # The parent of a node has a smaller number, so it has been added already.
    for other in range(1, keys.shape[0]):
        parent, symbol = places[keys[other] >> _HALF], np.uint32(keys[other] & _SYMBOL)
        if numbers.shape[0]:
            symbol = numbers[symbol]
        row = _find_child(table, parent, symbol)
        node = np.int64(table[row, 1])
        if node == 0:
            node = nodes
            table = _add_child(table, parent, symbol, row, node)
            nodes += 1
            if nodes > documents.shape[0]:
                documents, occurrences = _extended(documents, 0), _extended(occurrences, 0)
        places[other] = node
        documents[node] += other_documents[other]
        occurrences[node] += other_occurrences[other]
    return table, documents, occurrences, nodes


@compiled
def spell(chosen, keys, ends, chars):
    """Returns the code points of the terms of nodes, one per line; symbols are characters if `ends` is empty."""
    text, size = np.zeros(16 * chosen.shape[0] + 16, np.uint32), 0
    path = np.zeros(64, np.int64)
    for node in chosen:
        depth = 0
        key = keys[node]
        while key != _FREE:
            if depth == path.shape[0]:
                path = _extended(path, 0)
            path[depth] = np.int64(key & _SYMBOL)
            depth += 1
            key = keys[key >> _HALF]
        for i in range(depth - 1, -1, -1):
            symbol = path[i]
            length = ends[symbol] - ends[symbol - 1] if ends.shape[0] else 1
            if size + length + 1 > text.shape[0]:
                text = _extended(text, size + length + 1)
            if ends.shape[0]:
                _copy(chars, ends[symbol - 1], ends[symbol], text, size)
                text[size + length] = 32
                size += length + 1
            else:
                text[size] = symbol - 1
                size += 1
        if ends.shape[0]:
            size -= 1
        text[size] = 10
        size += 1
    return text[:size]


@compiled
def index_terms(symbols, bounds):
    """Returns the trie of terms (one per document) and the term of each node, -1 for mere prefixes."""
    table, nodes = np.zeros((4096, 2), np.uint64), 1
    columns = np.full(symbols.shape[0] + 1, -1, np.int32)
    for term in range(bounds.shape[0] - 1):
        node = 0
        for i in range(bounds[term], bounds[term + 1]):
            if symbols[i] == 0:
                continue
            row = _find_child(table, node, symbols[i])
            child = np.int64(table[row, 1])
            if child == 0:
                child = nodes
                table = _add_child(table, node, symbols[i], row, child)
                nodes += 1
            node = child
        columns[node] = term
    return table, columns[:nodes]


@compiled
def _sort(array, other, counts, largest):
    """Radix sort of `array`, in place or into `other`; three times as fast here as a comparison sort."""
    shift = 0
    while largest >> shift:
        for digit in range(2049):
            counts[digit] = 0
        for number in array:
            counts[((number >> shift) & 2047) + 1] += 1
        for digit in range(2048):
            counts[digit + 1] += counts[digit]
        for number in array:
            digit = (number >> shift) & 2047
            other[counts[digit]] = number
            counts[digit] += 1
        array, other = other, array
        shift += 11
    return array


@compiled
def lead_stops(symbols, bounds, words, by_characters):
    """
    Returns where the first `words` words of each document end; nothing for 0 words. A word is one symbol or, by
    characters, ends with a gap.
    """
    stops = np.empty(bounds.shape[0] - 1 if words > 0 else 0, np.int64)
    for document in range(stops.shape[0]):
        place, stop, left = bounds[document], bounds[document + 1], words
        while place < stop and left > 0:
            if not by_characters or symbols[place] == 0:
                left -= 1
            place += 1
        stops[document] = place
    return stops


@compiled
def weigh(symbols, bounds, table, columns, idf, max_n, sublinear, leads, lead_weight, power):
    """
    Returns rows of TF-IDF weights, raised to `power`, of norm 1 as CSR arrays: row bounds, sorted columns, values.

    `leads` is empty, or has a place in each document. Then a row has a second part for the terms before this place;
    its norm is `lead_weight` times that of the first part.
    """
    parts = 2 if leads.shape[0] > 0 else 1
    indptr = np.zeros(bounds.shape[0], np.int64)
    indices = np.empty(symbols.shape[0] * max_n * parts, np.int32)
    values = np.empty(indices.shape[0], np.float32)
    room = 0
    for document in range(bounds.shape[0] - 1):
        room = max(room, (bounds[document + 1] - bounds[document]) * max_n)
    found, other, counts = np.empty(room, np.int32), np.empty(room, np.int32), np.zeros(2049, np.int64)
    size = 0
    for document in range(bounds.shape[0] - 1):
        row, total = size, 0.0
        for part in range(parts):
            start, stop, hits = bounds[document], bounds[document + 1], 0
            if part == 1:
                stop = leads[document]
            for first in range(start, stop):
                node = 0
                for i in range(first, min(first + max_n, stop)):
                    # Every prefix of a term is a node; gaps and unknown words are not children of any node.
                    node = np.int64(table[_find_child(table, node, symbols[i]), 1])
                    if node == 0:
                        break
                    if columns[node] >= 0:
                        found[hits] = columns[node]
                        hits += 1
            if hits == 0:
                continue
            ordered = _sort(found[:hits], other[:hits], counts, idf.shape[0] - 1)
            begin, squares, i = size, 0.0, 0
            while i < hits:
                column, first = ordered[i], i
                while i < hits and ordered[i] == column:
                    i += 1
                count = float(i - first)
                weight = (1.0 + np.log(count) if sublinear and count > 1.0 else count) * idf[column]
                if power != 1.0:
                    weight = weight**power
                indices[size], values[size] = column + part * idf.shape[0], weight
                squares += weight * weight
                size += 1
            length = lead_weight if part == 1 else 1.0
            scale = length / np.sqrt(squares)
            for i in range(begin, size):
                values[i] *= scale
            total += length * length
        if parts == 2:
            norm = np.sqrt(total)
            for i in range(row, size):
                values[i] /= norm
        indptr[document + 1] = size
    return indptr, indices[:size], values[:size]
