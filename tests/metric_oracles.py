"""
Slow, obvious versions of the metrics, see `oracles.py`.

Predictions and truth are lists of lists of label ids, counts the training counts of the known labels.
"""

import math


def inverse_propensity(count, num_documents, a=0.55, b=1.5):
    """`1 / p_l` of one label, written as in the paper."""
    c = (math.log(num_documents) - 1) * (b + 1) ** a
    return 1 + c * math.exp(-a * math.log(count + b))


def count_of(label, counts):
    """Training count of a label; those beyond the known ones were never seen."""
    return counts[label] if label < len(counts) else 0


def ranking_metrics(predictions, truth, k):
    """P@k, nDCG@k, R@k and RP@k."""
    precision, ndcg, recall, r_precision = [], [], [], []
    for predicted, true in zip(predictions, truth, strict=True):
        hits = 0
        dcg = 0.0
        for place in range(k):
            if predicted[place] in true:
                hits += 1
                dcg += 1 / math.log2(place + 2)
        precision.append(hits / k)
        best = 0.0
        for place in range(min(k, len(true))):
            best += 1 / math.log2(place + 2)
        ndcg.append(dcg / best if true else 0.0)
        if true:
            recall.append(hits / len(true))
            r_precision.append(hits / min(k, len(true)))
    return {
        f"P@{k}": sum(precision) / len(precision),
        f"nDCG@{k}": sum(ndcg) / len(ndcg),
        f"R@{k}": sum(recall) / len(recall),
        f"RP@{k}": sum(r_precision) / len(r_precision),
    }


def propensity_metrics(predictions, truth, counts, num_documents, k, a=0.55, b=1.5):
    """PSP@k and PSnDCG@k: what the ranking collects over what the best ranking collects."""
    psp = best_psp = psndcg = best_psndcg = 0.0
    for predicted, true in zip(predictions, truth, strict=True):
        if not true:
            continue
        weights = {label: inverse_propensity(count_of(label, counts), num_documents, a, b) for label in true}
        norm = sum(1 / math.log2(place + 2) for place in range(min(k, len(true))))
        for place, label in enumerate(predicted[:k]):
            if label in weights:
                psp += weights[label]
                psndcg += weights[label] / math.log2(place + 2) / norm
        for place, weight in enumerate(sorted(weights.values(), reverse=True)[:k]):
            best_psp += weight
            best_psndcg += weight / math.log2(place + 2) / norm
    return {f"PSP@{k}": psp / best_psp, f"PSnDCG@{k}": psndcg / best_psndcg}


def hierarchical_metrics(predictions, truth, parents, k):
    """hP@k, hR@k and hF1@k: sets of labels with all their ancestors (Kiritchenko et al., 2006)."""

    def with_ancestors(labels):
        found = set()
        for label in labels:
            if label >= 0:
                found |= {label} | with_ancestors(parents[label] if label < len(parents) else ())
        return found

    shared = predicted_sizes = true_sizes = 0
    for predicted, true in zip(predictions, truth, strict=True):
        one, other = with_ancestors(predicted[:k]), with_ancestors(true)
        shared += len(one & other)
        predicted_sizes += len(one)
        true_sizes += len(other)
    precision, recall = shared / predicted_sizes, shared / true_sizes
    return {f"hP@{k}": precision, f"hR@{k}": recall, f"hF1@{k}": 2 * precision * recall / (precision + recall)}


def confusion(predictions, truth, k, label):
    """Hits, predictions and true occurrences of one label in the top k."""
    hits = predicted_times = true_times = 0
    for predicted, true in zip(predictions, truth, strict=True):
        is_predicted = label in predicted[:k]
        is_true = label in true
        hits += is_predicted and is_true
        predicted_times += is_predicted
        true_times += is_true
    return hits, predicted_times, true_times


def f1_metrics(predictions, truth, num_labels, k):
    """micro-F1@k and macro-F1@k, the latter over labels that are true or predicted somewhere."""
    all_hits = all_predicted = all_true = 0
    scores = []
    for label in range(num_labels):
        hits, predicted_times, true_times = confusion(predictions, truth, k, label)
        all_hits += hits
        all_predicted += predicted_times
        all_true += true_times
        if hits:
            precision, recall = hits / predicted_times, hits / true_times
            scores.append(2 * precision * recall / (precision + recall))
        elif predicted_times or true_times:
            scores.append(0.0)
    precision, recall = all_hits / all_predicted, all_hits / all_true
    return {f"micro-F1@{k}": 2 * precision * recall / (precision + recall), f"macro-F1@{k}": sum(scores) / len(scores)}


def bucket_metrics(predictions, truth, num_labels, counts, k, low, high):
    """Results over the labels with `low` to `high` training documents."""
    labels = true_labels = found_labels = all_hits = all_predicted = all_true = 0
    for label in range(num_labels):
        if not low <= count_of(label, counts) <= high:
            continue
        hits, predicted_times, true_times = confusion(predictions, truth, k, label)
        labels += 1
        true_labels += true_times > 0
        found_labels += hits > 0
        all_hits += hits
        all_predicted += predicted_times
        all_true += true_times
    return {
        "labels": labels,
        "true_labels": true_labels,
        "positives": all_true,
        f"recall@{k}": all_hits / all_true if all_true else None,
        f"precision@{k}": all_hits / all_predicted if all_predicted else None,
        f"coverage@{k}": found_labels / true_labels if true_labels else None,
        f"contribution@{k}": all_hits / len(predictions) / k,
    }
