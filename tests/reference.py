"""Attention written plainly: float64, one query and one key at a time."""

import cmath
import math

import torch

from trainer.model.backends import bias


def turned(vector, position, inv_freq):
    """``vector`` with channels m and m + M as one complex number, turned by position * inv_freq."""
    pairs, out = len(inv_freq), list(vector)
    for m, frequency in enumerate(inv_freq):
        z = complex(vector[m], vector[m + pairs]) * cmath.exp(1j * frequency * position)
        out[m], out[m + pairs] = z.real, z.imag
    return out


def softmax(scores):
    """Probabilities of a list of logits."""
    weights = [math.exp(s - max(scores)) for s in scores]
    return [w / sum(weights) for w in weights]


def attend(queries, keys, values, *, factor=1.0, bias=None, sees=None, softcap=None, sink=None):
    """One head: lists ``[T][D]``, query i over keys j <= i (``bias(i, j)``, ``sees(i, j)``), scores
    within ``softcap`` and beside a ``sink``."""
    out = []

    def capped(score):
        return score if softcap is None else softcap * math.tanh(score / softcap)

    for i, q in enumerate(queries):
        seen = [j for j in range(i + 1) if sees is None or sees(i, j)]
        scores = [
            capped(
                factor
                * math.fsum(a * b for a, b in zip(q, keys[j], strict=True))
                / math.sqrt(len(q))
            )
            + (bias(i, j) if bias else 0.0)
            for j in seen
        ]
        shares = softmax([*scores, *([] if sink is None else [sink])])
        mixture = list(zip(shares[: len(seen)], (values[j] for j in seen), strict=True))
        out.append([math.fsum(p * v[d] for p, v in mixture) for d in range(len(values[0]))])
    return out


def attention_layer(x, attention, heads, kv_heads, encode=None, **options):
    """A whole layer on one sequence ``x`` ``[T, hidden]`` with the weights of ``attention``.

    ``encode(vector, position)`` turns queries and keys; ``bias`` takes (head, i, j); the other
    options are those of :func:`attend`.
    """
    x = x.double()
    bias = options.pop("bias", None)

    def project(linear, count):
        rows = x @ linear.weight.double().T
        return rows.unflatten(-1, (count, -1)).transpose(0, 1).tolist()

    def placed(head):
        return [encode(v, i) for i, v in enumerate(head)] if encode else head

    queries = [placed(head) for head in project(attention.q_proj, heads)]
    keys = [placed(head) for head in project(attention.k_proj, kv_heads)]
    values = project(attention.v_proj, kv_heads)
    mixed = []
    for h, head in enumerate(queries):
        shared = h // (heads // kv_heads)
        of_head = (lambda i, j, h=h: bias(h, i, j)) if bias else None
        mixed.append(attend(head, keys[shared], values[shared], bias=of_head, **options))
    joined = torch.tensor(mixed, dtype=torch.float64).transpose(0, 1).flatten(1)
    return joined @ attention.o_proj.weight.double().T


def watch_attention(model, ids, layer=0):
    """Input and output ``[T, hidden]`` of one attention layer on one sequence ``[T]``."""
    seen = {}

    def hook(_, args, output):
        seen["x"], seen["y"] = args[0][0].detach(), output[0].detach()

    handle = model.layers[layer].self_attn.register_forward_hook(hook)
    with torch.no_grad():
        model(ids[None])
    handle.remove()
    return seen["x"], seen["y"]


def eager(q, k, v, mask):
    """A backend of attention that writes out all probabilities."""
    group, T, end = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = q.float() @ k.mT / math.sqrt(q.shape[3])
    more = bias(mask, range(end - T, end), range(end), scores)
    scores = scores + more if mask.slopes is not None else scores.masked_fill(~more, -math.inf)
    return (scores.softmax(dim=-1) @ v).to(q.dtype)
