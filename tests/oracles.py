"""
Slow, obvious versions of what the package computes: plain loops, no code shared with it.

One section per topic; a section uses nothing of another. The metrics are in `metric_oracles.py`.
"""

import math

import numpy as np

# ---- Label features, equation (4). Matrices are anything that can be read as matrix[i][j].


def label_vectors(documents, truth):
    """PIFA: the sum of the documents of each label, divided by its length; zero where a label has no documents."""
    num_documents, num_features, num_labels = len(documents), len(documents[0]), len(truth[0])
    vectors = np.zeros((num_labels, num_features))
    for label in range(num_labels):
        for document in range(num_documents):
            if truth[document][label]:
                for feature in range(num_features):
                    vectors[label, feature] += documents[document][feature]
        length = math.sqrt(sum(value * value for value in vectors[label]))
        if length > 0:
            vectors[label] /= length
    return vectors


# ---- The label tree, eq. 5, 6 and 8. Matrices are dense, nodes and labels in the order of the tree's arrays.


def cluster_chain(child_offsets):
    """`C^(t)` of every level: 1 where the row's node is a child of the column's node."""
    chain = []
    for offsets in child_offsets:
        matrix = np.zeros((offsets[-1], len(offsets) - 1))
        for parent in range(len(offsets) - 1):
            for child in range(offsets[parent], offsets[parent + 1]):
                matrix[child, parent] = 1
        chain.append(matrix)
    return chain


def membership(chain, above, level):
    """1 where the row's node of `level` is somewhere under the column's node of level `above` (0: the root)."""
    matrix = np.eye(chain[above].shape[1])
    for step in chain[above:level]:
        matrix = step @ matrix
    return matrix


def true_nodes(truth, chain, leaf_labels):
    """Equation (5): `Y^(t)` of every level, 1 where a child of the node is true."""
    levels = [np.array([[truth[i][label] for label in leaf_labels] for i in range(len(truth))], dtype=float)]
    for matrix in reversed(chain[1:]):
        below = levels[0]
        above = np.zeros((len(truth), matrix.shape[1]))
        for document in range(len(truth)):
            for child in range(matrix.shape[0]):
                for parent in range(matrix.shape[1]):
                    if below[document, child] and matrix[child, parent]:
                        above[document, parent] = 1
        levels.insert(0, above)
    return levels


def true_label_counts(truth, chain, leaf_labels):
    """Equation (6): `R^(t)` of every level, the number of true labels under a node."""
    levels = [np.array([[truth[i][label] for label in leaf_labels] for i in range(len(truth))], dtype=float)]
    for matrix in reversed(chain[1:]):
        above = np.zeros((len(truth), matrix.shape[1]))
        for document in range(len(truth)):
            for child in range(matrix.shape[0]):
                for parent in range(matrix.shape[1]):
                    above[document, parent] += levels[0][document, child] * matrix[child, parent]
        levels.insert(0, above)
    return levels


def importance_weights(counts, alpha):
    """The loss weights made of `R^(t)`: a true node's share of the document's true labels, `alpha` elsewhere."""
    weights = np.full(counts.shape, alpha, dtype=float)
    for document in range(counts.shape[0]):
        for node in range(counts.shape[1]):
            if counts[document, node] > 0:
                weights[document, node] = counts[document, node] / sum(counts[document])
    return weights


def shortlist(predicted, true, matrix):
    """
    Equation (8), binarised: 1 where the node's parent is predicted or true for the document.

    Each of `predicted` and `true` holds nodes of the level above, or is left out.
    """
    num_documents = len(predicted if predicted is not None else true)  # type: ignore[arg-type]
    chosen = np.zeros((num_documents, matrix.shape[0]))
    for part in (predicted, true):
        if part is not None:
            for document in range(num_documents):
                for child in range(matrix.shape[0]):
                    for parent in range(matrix.shape[1]):
                        if part[document, parent] and matrix[child, parent]:
                            chosen[document, child] = 1
    return chosen


def top_nodes(scores, k):
    """Equation (7): 1 for the `k` best nodes of each document."""
    chosen = np.zeros(scores.shape)
    for document in range(scores.shape[0]):
        ranking = sorted(range(scores.shape[1]), key=lambda node: (-scores[document, node], node))
        for node in ranking[:k]:
            chosen[document, node] = 1
    return chosen


# ---- The objective of one level, equation (9). Documents end in a constant 1: the bias is a weight like any other.


def loss_value(loss, target, logit):
    """`L(y, s)` with `y` in {0, 1}."""
    sign = 1.0 if target else -1.0
    if loss == "squared_hinge":
        return max(0.0, 1 - sign * logit) ** 2
    assert loss == "logistic"
    wrong = -sign * logit
    return wrong + math.log1p(math.exp(-wrong)) if wrong > 0 else math.log1p(math.exp(wrong))


def node_objective(
    weights, documents, targets, chosen, loss_weights, loss, prior=0.0, regularisation=0.5, centre=None
):
    """
    The part of equation (9) that concerns one node: targets, chosen and loss weights are its columns.

    With a `centre`, weights are drawn to it, and not to 0: equation (11') of METHODS.
    """
    centre = [0.0] * len(weights) if centre is None else centre
    total = 0.0
    for document, target, is_chosen, loss_weight in zip(documents, targets, chosen, loss_weights, strict=True):
        if is_chosen:
            logit = prior
            for weight, value in zip(weights, document, strict=True):
                logit += weight * value
            total += loss_weight * loss_value(loss, target, logit)
    return total + regularisation * sum((weight - to) ** 2 for weight, to in zip(weights, centre, strict=True))


def level_objective(
    weights, documents, targets, chosen, loss_weights, loss, prior=0.0, regularisation=0.5, centres=None
):
    """Equation (9): one row of `weights` per node, `targets`, `chosen` and `loss_weights` (documents, nodes)."""
    total = 0.0
    for node in range(len(weights)):
        columns = (targets[:, node], chosen[:, node], loss_weights[:, node])
        centre = None if centres is None else centres[node]
        total += node_objective(weights[node], documents, *columns, loss, prior, regularisation, centre)
    return total


def node_prior(documents, truth, texts, groups):
    """
    The direction of W_prior of equation (11') for each of `groups`, which are nested lists of labels.

    That of a label is the normalised sum of the vector of its text and of its centroid, that of a node above the
    normalised mean of its children.
    """
    found = []
    for group in groups:
        if isinstance(group, int):
            centroid = [0.0] * len(documents[0])
            for document, labels in zip(documents, truth, strict=True):
                if labels[group]:
                    centroid = [total + value for total, value in zip(centroid, document, strict=True)]
            found.append(_unit([c + t for c, t in zip(_unit(centroid), texts[group], strict=True)]))
        else:
            children = node_prior(documents, truth, texts, group)
            found.append(_unit([sum(values) / len(children) for values in zip(*children, strict=True)]))
    return found


def _unit(vector):
    length = math.sqrt(sum(value * value for value in vector))
    return [value / length if length > 1e-6 else 0.0 for value in vector]


# ---- Label-aware fine-tuning, eq. 15. Vectors of documents and of the texts of the labels 0, 1, ...; `read` are the
# labels whose texts are in the batch, `drawn` lists of positives and `truth` of all true labels of each document.


def pair_loss(documents, texts, read, drawn, truth, temperature=0.05):
    """The mean of equation (15) over the documents that have a positive."""
    losses = []
    for document, positives, true in zip(documents, drawn, truth, strict=True):
        if not positives:
            continue
        powers = {label: math.exp(float(np.dot(document, texts[label])) / temperature) for label in set(read)}
        negatives = sum(power for label, power in powers.items() if label not in true)
        terms = [math.log(powers[label] / (powers[label] + negatives)) for label in positives]
        losses.append(-sum(terms) / len(terms))
    return sum(losses) / len(losses)


# ---- Scoring through the tree: `weights` holds one (nodes, features) matrix per level, documents end in a constant 1.


def logits_of(documents, weights):
    """`w . x` of every document and every node, level by level."""
    levels = []
    for matrix in weights:
        logits = np.zeros((len(documents), len(matrix)))
        for document in range(len(documents)):
            for node in range(len(matrix)):
                for feature in range(len(documents[document])):
                    logits[document, node] += documents[document][feature] * matrix[node][feature]
        levels.append(logits)
    return levels


def log_probability(loss, logit):
    """Logarithm of the probability that stands for a logit: `exp(-max(0, 1 - s)^2)` or the sigmoid."""
    if loss == "squared_hinge":
        return -(max(0.0, 1 - logit) ** 2)
    assert loss == "logistic"
    return -math.log(1 + math.exp(-logit))


def beam_scores(logits, child_offsets, loss, ranking, beam_size, start=None):
    """
    Score of every node of the last level below the `beam_size` best nodes of each level; -inf out of reach.

    It is the sum of the log probabilities of the path, or the node's own logit (`ranking="leaf"`).

    A search begins at the root, or at each document's (logarithm of the probability, node) pairs in `start`: logits
    and offsets are then those of the levels below.
    """
    num_documents = len(logits[0])
    result = np.full(logits[-1].shape, -math.inf)
    for document in range(num_documents):
        beam = [(0.0, 0)] if start is None else list(start[document])
        reached: list[tuple[float, int]] = []
        for level, offsets in enumerate(child_offsets[: len(logits)]):
            reached = []
            for score, parent in beam:
                for child in range(offsets[parent], offsets[parent + 1]):
                    logit = logits[level][document, child]
                    if level == len(logits) - 1 and ranking == "leaf":
                        reached.append((logit, child))
                    else:
                        reached.append((score + log_probability(loss, logit), child))
            beam = sorted(reached, key=lambda entry: (-entry[0], entry[1]))[:beam_size]
        for score, node in reached:
            result[document, node] = score
    return result


# ---- Heads on an encoder: `logits` holds one (documents, nodes) matrix per trained level, `levels` which ones these
# are, counted from 1 and ascending; some of the tree's levels may be missing among them.


def head_probability(loss, logit):
    """The probability that a logit of a head stands for."""
    if loss == "bce":
        return 1 / (1 + math.exp(-logit))
    assert loss == "squared_hinge"
    return min(1.0, max(0.0, (logit + 1) / 2))


def nodes_under(child_offsets, upper, node, lower):
    """Nodes of level `lower` under one node of level `upper` (0: the root)."""
    nodes = [node]
    for offsets in child_offsets[upper:lower]:
        nodes = [child for parent in nodes for child in range(offsets[parent], offsets[parent + 1])]
    return nodes


def head_scores(logits, levels, child_offsets, loss, by_path, beam_size):
    """
    The probability of every node of the last level that a beam reaches; -1 for the others.

    The beam keeps the nodes with the largest product of probabilities; 0 keeps all. The result is that product, or the
    last factor of it alone.
    """
    result = np.full(logits[-1].shape, -1.0)
    for document in range(len(logits[0])):
        beam = [(1.0, 0)]
        above = 0
        for level, level_logits in zip(levels, logits, strict=True):
            reached = []
            for product, parent in beam:
                for node in nodes_under(child_offsets, above, parent, level):
                    own = head_probability(loss, level_logits[document, node])
                    reached.append((product * own, node))
                    if level == levels[-1]:
                        result[document, node] = product * own if by_path else own
            reached.sort(key=lambda entry: (-entry[0], entry[1]))
            beam = reached[:beam_size] if beam_size else reached
            above = level
    return result


# ---- From token states to a document vector.


def pooled(layers, mask, pooling):
    """One document's vector: `layers` are (tokens, dimensions) each, `mask` is 1 where a token is no padding."""
    tokens = [place for place in range(len(mask)) if mask[place]]
    parts = []
    for states in layers:
        if pooling == "mean":
            part = [sum(states[place][i] for place in tokens) / len(tokens) for i in range(states.shape[1])]
        else:
            part = list(states[tokens[0] if pooling == "cls" else tokens[-1]])
        parts.extend(part)
    length = math.sqrt(sum(value * value for value in parts))
    return np.array([value / length for value in parts])


# ---- Levels that are trained together. Rows end in the bias; `true` holds each document's true nodes.


def projected(documents, projection):
    """Each document on each row of a projection, and the constant 1 of the bias."""
    shorter = np.ones((len(documents), len(projection) + 1))
    for document in range(len(documents)):
        for row in range(len(projection)):
            shorter[document, row] = sum(a * b for a, b in zip(documents[document], projection[row], strict=True))
    return shorter


def with_constant(documents):
    """Documents with the constant 1 of the bias."""
    return np.hstack([documents, np.ones((len(documents), 1))])


def sum_of_losses(logits, shown, true, alpha, loss):
    """Mean over documents of the losses of the nodes shown; `true` gives the weights of true nodes, others weigh α."""
    kind = {"bce": "logistic", "squared_hinge": "squared_hinge"}[loss]
    total = 0.0
    for document, nodes in enumerate(shown):
        for node in nodes:
            target = node in true[document]
            weight = true[document][node] if target else alpha
            total += weight * loss_value(kind, int(target), logits[document, node])
    return total / len(logits)


def dynamic_candidates(logits_above, offsets, true, beam_size):
    """LightXML: for each document the nodes under its best nodes above, its true nodes and all siblings of these."""
    found = []
    for document, logits in enumerate(logits_above):
        above = sorted(range(len(logits)), key=lambda node: -logits[node])[:beam_size]
        above += [
            node for node in range(len(logits)) for t in true[document] if offsets[node] <= t < offsets[node + 1]
        ]
        found.append(sorted({child for node in above for child in range(offsets[node], offsets[node + 1])}))
    return found


def adaptive_loss(documents, tails, num_frequent, true, weights, alpha, loss):
    """APLC below the gates: all labels of a tail for the documents with a true label in it. `tails`: (P, rows)."""
    total, first = 0.0, num_frequent
    for projection, rows in tails:
        (logits,) = logits_of(projected(documents, projection), [rows])
        own = [
            {node - first: weight for node, weight in zip(nodes, row) if first <= node < first + len(rows)}
            for nodes, row in zip(true, weights, strict=True)
        ]
        shown = [range(len(rows)) if document else () for document in own]
        total += sum_of_losses(logits, shown, own, alpha, loss)
        first += len(rows)
    return total


def adaptive_probabilities(documents, gates, tails, num_frequent, loss):
    """APLC: `p(l)` of frequent labels, `p(gate) p(l | gate)` of all others."""
    (above,) = logits_of(with_constant(documents), [gates])
    columns = [[head_probability(loss, logit) for logit in above[:, node]] for node in range(num_frequent)]
    for gate, (projection, rows) in enumerate(tails, start=num_frequent):
        (logits,) = logits_of(projected(documents, projection), [rows])
        for label in range(len(rows)):
            columns.append(
                [
                    head_probability(loss, above[document, gate]) * head_probability(loss, logits[document, label])
                    for document in range(len(documents))
                ]
            )
    return np.array(columns).T


def frequency_partition(counts, shares, by_mass):
    """Labels by frequency in the parts of a whole: a label goes where its own piece of the whole begins."""
    order = sorted(range(len(counts)), key=lambda label: (-counts[label], label))
    whole = sum(counts) if by_mass else len(counts)
    parts = [[] for _ in shares]
    before = 0
    for label in order:
        part = 0
        while part + 1 < len(shares) and before >= sum(shares[: part + 1]) * whole - 1e-6:
            part += 1
        parts[part].append(label)
        before += counts[label] if by_mass else 1
    return parts


# ---- Ensembles: what each model predicts of one document are (label, score) pairs, best first.


def member_log_odds(pairs, names):
    """Log-odds of each label by one model of an ensemble; labels that it does not return have the lowest."""
    odds = {label: np.log(p / (1 - p)) for label, score in pairs for p in [min(max(score, 1e-6), 1 - 1e-6)]}
    return np.array([odds.get(name, min(odds.values(), default=0.0)) for name in names])


def ensemble_scores(predictions, weights, combine):
    """The weighted mean of scores, or of one over the rank, of every label that some model predicts."""
    result = {}
    for pairs, weight in zip(predictions, weights, strict=True):
        for place, (label, score) in enumerate(pairs):
            value = score if combine == "scores" else 1 / (place + 1)
            result[label] = result.get(label, 0.0) + weight * value
    return result


# ---- Label vectors, votes and the last scorer, equations (12) to (14). Vectors are lists of numbers of length 1 or 0;
# `truth` lists the labels of each document.


def centroid(documents, truth, label, words):
    """The normalised sum of the documents of a label over the columns `words`, each scaled to length 1 there."""
    total = [0.0] * len(words)
    for document, labels in zip(documents, truth, strict=True):
        norm = math.sqrt(sum(document[word] ** 2 for word in words))
        if label in labels and norm:
            for place, word in enumerate(words):
                total[place] += document[word] / norm
    return total


def cosine(first, second):
    """The cosine of two vectors, 0 if one is zero."""
    product = sum(a * b for a, b in zip(first, second, strict=True))
    norms = math.sqrt(sum(a * a for a in first)) * math.sqrt(sum(b * b for b in second))
    return product / norms if norms else 0.0


def pruned(vector, least=0.05):
    """The vector scaled to length 1, without its entries below `least`."""
    norm = math.sqrt(sum(value * value for value in vector))
    return [value / norm if norm and abs(value) / norm >= least else 0.0 for value in vector]


def product(document, vector):
    """The dot product of a vector and a document scaled to length 1."""
    norm = math.sqrt(sum(value * value for value in document))
    return sum(a * b for a, b in zip(document, vector, strict=True)) / norm if norm else 0.0


def softmax_votes(query, documents, truth, count, temperature):
    """Share of each label in the votes of the `count` nearest documents, which weigh `exp(cos / temperature)`."""
    nearest = sorted(range(len(documents)), key=lambda j: -cosine(query, documents[j]))[:count]
    weights = [math.exp(cosine(query, documents[j]) / temperature) for j in nearest]
    votes = {}
    for j, weight in zip(nearest, weights, strict=True):
        for label in truth[j]:
            votes[label] = votes.get(label, 0.0) + weight / sum(weights)
    return votes


def last_logit(scores, best, weights, count, most, count_weights, bias, unseen_bias):
    """The logit of one label: `scores` and `best` of all parts; `weights` (part, view, rare or frequent or unseen)."""
    if count == 0:
        logit = unseen_bias
        for part, score in enumerate(scores):
            logit += weights[part][0][2] * score + weights[part][1][2] * (score - best[part])
        return logit
    frequency = math.log(1 + count) / math.log(1 + most)
    logit = bias + count_weights[0] * math.log(1 + count) + count_weights[1] * math.log(1 + count) ** 2
    for part, score in enumerate(scores):
        for view, value in enumerate((score, score - best[part])):
            rare, frequent, _ = weights[part][view]
            logit += ((1 - frequency) * rare + frequency * frequent) * value
    return logit
