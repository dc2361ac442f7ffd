"""A text model: multinomial logistic regression over hashed words and pairs of words, with numpy.

It only measures. Gateways run no text model, because prompts of unseen sources are told worse than by rules
(docs/prediction.md).
"""

import itertools
import re
import zlib

import numpy as np

BUCKETS = 2048
HEAD_CHARACTERS, TAIL_CHARACTERS = 1200, 400
"""Characters of a prompt that are read, from its beginning and from its end."""
ROUNDS, RATE, DECAY = 150, 4.0, 2e-4
_WORDS = re.compile(r"[a-z]+|[0-9]+|[^\sa-z0-9]")


def features(text: str) -> list[int]:
    """The buckets of the words and pairs of words of a prompt, each once."""
    if len(text) > HEAD_CHARACTERS + TAIL_CHARACTERS:
        text = f"{text[:HEAD_CHARACTERS]} {text[-TAIL_CHARACTERS:]}"
    words = ["0" if word.isdigit() else word for word in _WORDS.findall(text.lower())]
    pairs = [f"{one} {other}" for one, other in itertools.pairwise(words)]
    return sorted({zlib.crc32(part.encode()) % BUCKETS for part in (*words, *pairs)})


def matrix(texts: list[str]) -> np.ndarray:
    rows = np.zeros((len(texts), BUCKETS), dtype=np.float32)
    for index, text in enumerate(texts):
        found = features(text)
        rows[index, found] = 1 / np.sqrt(len(found) or 1)
    return rows


def fit(texts: list[str], labels: list[str], classes: list[str], *, decay: float = DECAY) -> np.ndarray:
    """Weights of each bucket and the constant, one column for each class. Classes weigh alike."""
    x = matrix(texts)
    y = np.eye(len(classes), dtype=np.float32)[[classes.index(label) for label in labels]]
    weight = (len(labels) / len(classes) / y.sum(0))[y.argmax(1)] / len(labels)
    weights = np.zeros((BUCKETS + 1, len(classes)), dtype=np.float32)
    speed = np.zeros_like(weights)
    for _ in range(ROUNDS):
        scores = x @ weights[:-1] + weights[-1]
        scores -= scores.max(1, keepdims=True)
        shares = np.exp(scores)
        shares /= shares.sum(1, keepdims=True)
        error = (shares - y) * weight[:, None]
        slope = np.vstack([x.T @ error + decay * weights[:-1], error.sum(0)])
        speed = 0.9 * speed - RATE * slope
        weights += speed
    return weights


def predict(weights: np.ndarray, texts: list[str], classes: list[str]) -> list[tuple[str, float]]:
    """The class of each text, and its probability."""
    scores = matrix(texts) @ weights[:-1] + weights[-1]
    scores -= scores.max(1, keepdims=True)
    shares = np.exp(scores)
    shares /= shares.sum(1, keepdims=True)
    return [(classes[index], float(row[index])) for index, row in zip(shares.argmax(1), shares, strict=True)]
