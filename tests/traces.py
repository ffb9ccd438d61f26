"""What the mathematics is tested on: random traces, a policy of numpy's size, and the slow definitions."""

import jax
import jax.numpy as jnp
import numpy as np

GAMMA = 0.9
CLOSE = dict(rtol=1e-5, atol=1e-5)


def random_trace(rng, T=12, end_probability=0.2):
    """value, reward, discount, cut, log_w of a trace with terminations, truncations, two ends in a row, an end on its
    edge, by chance."""
    terminated, truncated = rng.random(T) < end_probability, rng.random(T) < end_probability
    discount = np.where(terminated, 0.0, GAMMA)
    value, reward, log_w = rng.normal(size=T + 1), rng.normal(size=T), 1.5 * rng.normal(size=T)
    return value, reward, discount, terminated | truncated, log_w


def slow_v_gae(value, reward, discount, cut, log_w, lambda_, c_bar=1.0):
    """The definition, as a double loop: A_t = sum_k (prod of what lies between) delta_{t+k}, up to the cut."""
    w = np.minimum(c_bar, np.exp(log_w))
    delta = [w[t] * (reward[t] + discount[t] * value[t + 1] - value[t]) for t in range(len(reward))]
    advantage = []
    for t in range(len(reward)):
        total, weight = 0.0, 1.0
        for k in range(t, len(reward)):
            total += weight * delta[k]
            if cut[k]:
                break
            weight *= discount[k] * lambda_ * w[k]
        advantage.append(total)
    return np.array(advantage), np.array(advantage) + value[:-1]


def log_softmax(x):
    """Of numpy arrays, along the last axis."""
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


# --- a policy whose "frames" are six numbers --------------------------------------------------------------------------


def tiny_apply(params, obs):
    """A linear policy and critic on the first pixels of a frame."""
    x = obs.reshape(obs.shape[0], -1)[:, :6].astype(jnp.float32) / 255.0
    return x @ params["policy"], x @ params["value"]


def tiny_params(rng, scale=2.0):
    params = {"policy": scale * rng.normal(size=(6, 4)), "value": rng.normal(size=6)}
    return jax.tree.map(lambda x: jnp.array(x, jnp.float32), params)


def random_columns(rng, worker, B=5, T=8, end_probability=0.2) -> dict[str, np.ndarray]:
    """The fields of a script's Rollout, played by the policy `worker`."""
    obs = rng.integers(0, 256, (B, T + 1, 1, 2, 3), dtype=np.uint8)
    action = rng.integers(0, 4, (B, T))
    logits = np.array(tiny_apply(worker, obs[:, :-1].reshape(B * T, 1, 2, 3))[0]).reshape(B, T, 4)
    logp = np.take_along_axis(log_softmax(logits), action[..., None], -1)[..., 0]
    cut = rng.random((B, T)) < end_probability
    for t in range(1, T):
        cut[:, t] &= ~cut[:, t - 1]  # the row after an end is a dummy, and never an end itself
    mask = np.concatenate([np.ones((B, 1), bool), ~cut[:, :-1]], axis=1)
    discount = np.where(cut & (rng.random((B, T)) < 0.5), 0.0, GAMMA).astype(np.float32)
    reward = rng.normal(size=(B, T)).astype(np.float32)
    return dict(obs=obs, action=action, logp=logp, reward=reward, discount=discount, cut=cut, mask=mask)


def dirty(rng, columns):
    """The same rollout with garbage in its dummy rows: NaN, other actions, other frames."""
    dummy, obs = ~columns["mask"], columns["obs"].copy()
    assert dummy.sum() > 10
    obs[:, :-1][dummy] = rng.integers(0, 256, obs[:, :-1][dummy].shape)
    nan = {name: np.where(dummy, np.nan, columns[name]) for name in ("logp", "reward", "discount")}
    return columns | nan | {"obs": obs, "action": np.where(dummy, rng.integers(0, 4, dummy.shape), columns["action"])}
