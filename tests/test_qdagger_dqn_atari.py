"""qdagger_dqn_atari.py: replay, targets, distillation, both phases, the other workflows, faults."""

import csv
import json
import signal
import threading
from dataclasses import asdict
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from micro_envs import ConstantReward, MatchTheBit, RightAction
from micro_qdagger import (
    GAMMA,
    SMALL,
    Micro,
    action_values,
    fake_teacher,
    interrupt_at,
    params_of,
    refused,
    rows_of,
)  # fmt: skip

import qdagger_dqn_atari as script
import teachers


# --- replay: n-step windows against a walk through everything that was played -----------------------------------------
def played(num_envs, steps, seed, end_probability=0.15):
    """Random play of EnvPool's kind: per environment a list of rows, with dummy rows after ends and true stacks. Ends
    are games, lives (which do not empty the stack) and time limits."""
    rng, histories = np.random.default_rng(seed), []
    for _ in range(num_envs):
        rows, dummy, stack = [], False, None
        for _ in range(steps):
            frame = rng.integers(0, 256, (2, 3), np.uint8)
            new = stack is None or rows[-1]["dummy"] and rows[-2]["over"]
            stack = np.stack([frame] * 4) if new else np.stack([*stack[1:], frame])
            end = not dummy and rng.random() < end_probability
            terminated = end and rng.random() < 0.6
            reward = 0.0 if dummy else float(rng.normal())
            row = dict(obs=stack, action=int(rng.integers(3)), reward=reward, dummy=dummy)
            over = end and not (terminated and rng.random() < 0.5)
            rows.append(row | dict(terminated=terminated, truncated=end and not terminated, over=over))
            dummy = end
        histories.append(rows)
    return histories


def columns(at_once):
    names = ("obs", "action", "reward", "terminated", "truncated", "over")
    return (np.array([row[name] for row in at_once]) for name in names)


def filled(histories, rows):
    buffer = script.ReplayBuffer(len(histories), rows, (2, 3), 3)
    for at_once in zip(*histories):
        buffer.add(*columns(at_once), np.full((len(histories), 3), 1 / 3))
    return buffer


def expected_transition(history, i, n):
    """By a walk: (obs, action, discounted rewards, discount, next obs)."""
    total, factor = 0.0, 1.0
    for k in range(n):
        row = history[i + k]
        total, factor = total + factor * row["reward"], factor * GAMMA
        if row["terminated"] or row["truncated"]:
            break
    bootstrap = 0.0 if row["terminated"] else factor
    return history[i]["obs"], history[i]["action"], total, bootstrap, history[i + k + 1]["obs"]


@pytest.mark.parametrize("n", [1, 3, 5])
@pytest.mark.parametrize("steps", [17, 40, 41, 73, 200])
def test_transitions_equal_a_walk_through_the_games(n, steps):
    """Ends at every offset, dummy rows, stacks over a ring that has wrapped round or not. No state is missing that has
    its stack and its window in the ring, the last of an episode included, and none starts in a dummy row."""
    histories = played(4, steps, seed=n)
    rows = 40
    buffer, checked = filled(histories, rows), 0
    for env, history in enumerate(histories):
        oldest = max(0, steps - rows)
        for i in range(oldest, steps):
            begin = next(j for j in range(i, -1, -1) if j == 0 or history[j - 1]["dummy"] and history[j - 2]["over"])
            stack_there = i - min(3, i - begin) >= oldest
            there = stack_there and not history[i]["dummy"] and i + n < steps
            where = np.array([env]), np.array([i % rows])
            assert buffer.known(*where, n) == there, (env, i)
            if there:
                got = jax.tree.map(lambda x: x[0], buffer.transitions(*where, n, GAMMA))
                obs, action, total, discount, next_obs = expected_transition(history, i, n)
                np.testing.assert_array_equal(got.obs, obs)
                assert got.action == action
                np.testing.assert_allclose([got.n_step_reward, got.discount], [total, discount], rtol=1e-6, atol=1e-7)
                if discount:
                    np.testing.assert_array_equal(got.next_obs, next_obs)
                checked += 1
    assert checked > min(steps, rows)


def test_sampling_is_uniform_over_the_known_rows():
    buffer = filled(played(3, 100, seed=5), 40)
    env, t = np.meshgrid(np.arange(3), np.arange(40), indexing="ij")
    known = buffer.known(env.ravel(), t.ravel(), 3).reshape(3, 40)
    draws = buffer.sample(np.random.default_rng(0), (4, 10_000), 3)
    counts = np.zeros((3, 40))
    np.add.at(counts, draws, 1)
    assert not counts[~known].any()
    expected = 40_000 / known.sum()
    assert abs(counts[known] - expected).max() < 5 * np.sqrt(expected)


def test_exported_data_become_the_same_transitions_but_for_time_limits():
    """To teachers.Replay and back: only windows that end at a time limit go, since files lack its observation, and the
    first two states of a new life, since files know beginnings of games alone."""
    n, histories = 3, played(2, 90, seed=7)
    buffer = filled(histories, 60)
    parts = [buffer.export(env, {}) for env in range(2)]
    joined = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("frames", "action", "reward", "terminated", "truncated", "first")
    }
    again, frames = script.ReplayBuffer(2, 60, (2, 3), 3), joined["frames"]
    again.fill(teachers.Replay(**joined, protocol={}, source=""), n)
    assert np.shares_memory(again.frames, frames)  # no copy of seven gigabytes
    second = np.concatenate([again.export(env, {}).first for env in range(2)])
    np.testing.assert_array_equal(second, joined["first"])  # no dummy row becomes a beginning
    lost = 0
    for env in range(2):
        for i in range(30, 90):
            old, new = (np.array([env]), np.array([i % 60])), (np.array([env]), np.array([i - 30]))
            window = histories[env][i : i + n]
            end = next((k for k, row in enumerate(window) if row["terminated"] or row["truncated"]), None)
            at_limit = end is not None and window[end]["truncated"]
            past = histories[env][max(i - 3, 1) : i]
            new_life = any(row["dummy"] and not histories[env][i - 4 + k]["over"] for k, row in enumerate(past))
            if not buffer.known(*old, n) or at_limit or (new_life and not again.known(*new, n)):
                lost += bool(buffer.known(*old, n)[0])
                assert not again.known(*new, n)
                continue
            assert again.known(*new, n)
            one, other = buffer.transitions(*old, n, GAMMA), again.transitions(*new, n, GAMMA)
            for name in ("obs", "action", "n_step_reward", "discount"):
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
            if one.discount[0]:
                np.testing.assert_array_equal(one.next_obs, other.next_obs)
    assert lost


def test_n_step_return_by_hand():
    reward = np.array([[1.0, 2.0, 4.0]] * 4)
    terminated = np.array([[0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 1]], bool)
    truncated = np.array([[0, 0, 0], [0, 0, 1], [1, 1, 0], [0, 0, 0]], bool)
    total, discount, steps = script.n_step_return(reward, terminated, truncated, 0.5)
    np.testing.assert_allclose(total, [3.0, 2.0, 1.0, 3.0])
    np.testing.assert_allclose(discount, [0.125, 0.0, 0.5, 0.0])
    assert steps.tolist() == [3, 2, 1, 3]


def test_memory_of_a_replay():
    buffer = script.ReplayBuffer(2, 500, (84, 84), 6)
    total = sum(x.nbytes for x in vars(buffer).values() if isinstance(x, np.ndarray))
    assert total / 1000 < 7056 * 1.05


# --- distillation and weaning -----------------------------------------------------------------------------------------
def test_distillation_is_the_kl_with_the_gradient_of_cross_entropy():
    rng = np.random.default_rng(0)
    q, scores, tau = rng.normal(size=(5, 4)), rng.normal(size=(5, 4)), 0.1

    def policy_of(kind):
        teacher = SimpleNamespace(kind=kind, params=scores.astype(np.float32), apply=lambda obs, params: params)
        return script.Mentor(teacher, tau).policy(np.zeros((5, 4, 84, 84), np.uint8))

    policy = policy_of("q")
    softmax = lambda x: np.exp(x - x.max(1, keepdims=True)) / np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)  # noqa: E731
    np.testing.assert_allclose(policy, softmax(scores / tau), rtol=1e-5)
    np.testing.assert_allclose(policy_of("policy"), softmax(scores), rtol=1e-5)
    pi = softmax(q / tau)
    kl = (policy * (np.log(policy) - np.log(pi))).sum(1)
    np.testing.assert_allclose(script.distillation(jnp.asarray(policy), jnp.asarray(q), tau), kl, rtol=1e-4)
    gradient = jax.grad(lambda q: script.distillation(jnp.asarray(policy), q, tau).sum())(jnp.asarray(q))
    np.testing.assert_allclose(gradient, (pi - policy) / tau, rtol=1e-4, atol=1e-5)


def test_distillation_of_certain_and_of_absent_teachers():
    """A one-hot policy has log 0 in it; a teacher that was not asked leaves zeros. Neither may give NaN."""
    policy, q = jnp.array([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]), jnp.array([[5.0, 0.0, 0.0], [1.0, 2.0, 3.0]])
    loss, gradient = jax.value_and_grad(lambda q: script.distillation(policy, q, 0.1).sum())(q)
    assert abs(loss) < 1e-6 and np.isfinite(gradient).all() and not gradient[1].any()


@pytest.mark.parametrize(
    "weight, student, step, expected",
    [
        (1.0, -20.7, 100, 1.0),  # no better than random
        (1.0, -5.7, 100, 0.5),  # half way from random to the teacher, both scores negative on the way
        (1.0, -21.0, 100, 1.0),  # worse than random: not above 1
        (0.3, 9.3, 100, 0.0),  # as good as the teacher
        (0.3, 20.0, 100, 0.0),  # better
        (0.0, -20.7, 100, 0.0),  # once weaned it stays so
        (1.0, -20.7, 500, 0.0),  # the limit
        (0.2, -5.7, 499, 0.5),  # it may rise again before
    ],
)
def test_distill_weight(weight, student, step, expected):
    assert script.distill_weight(weight, student, 9.3, -20.7, step, 500) == pytest.approx(expected, abs=1e-6)


# --- one update, against numpy and optax ------------------------------------------------------------------------------
def test_update_equals_a_plain_reimplementation():
    rng, args = np.random.default_rng(0), script.Args(teacher="none", target_period=2, network="shallow")
    apply_fn = lambda params, obs: obs.reshape(len(obs), -1) / 255.0 @ params["w"]  # noqa: E731
    params, target = ({"w": rng.normal(size=(24, 3)).astype(np.float32)} for _ in range(2))
    policy = rng.dirichlet(np.ones(3), size=8).astype(np.float32)
    obs, next_obs = rng.integers(0, 256, (2, 8, 4, 2, 3), np.uint8)
    reward, discount = 3 * rng.normal(size=8).astype(np.float32), rng.choice([0.0, 0.9**3], 8).astype(np.float32)
    batch = script.Transitions(obs, rng.integers(0, 3, 8), reward, discount, next_obs, policy)

    def loss(params):
        q, next_q = (x.reshape(8, -1) / 255.0 @ p["w"] for x, p in ((obs, params), (next_obs, target)))
        error = batch.n_step_reward + batch.discount * next_q.max(1) - q[np.arange(8), batch.action]
        huber = jnp.where(abs(error) <= 1, error**2 / 2, abs(error) - 0.5)
        log_pi = q / 0.1 - jax.scipy.special.logsumexp(q / 0.1, axis=1, keepdims=True)
        return huber.mean() + 3.0 * 0.4 * (policy * (np.log(policy) - log_pi)).sum(1).mean()

    tx = optax.scale_by_adam(eps=1.5e-4)
    state = script.QState.create(apply_fn=apply_fn, params=params, tx=tx, target_params=target)
    value, metrics = script.dqn_loss(params, state, batch, 0.4, args)
    assert value == pytest.approx(float(loss(params)), rel=1e-5)
    assert value == pytest.approx(float(metrics["losses/td_loss"] + 1.2 * metrics["losses/distill_loss"]), rel=1e-5)

    adam = optax.adam(1e-2, eps=1.5e-4)
    update, opt_state = adam.update(jax.grad(loss)(params), adam.init(params), params)
    expected = optax.apply_updates(params, update)
    update, _ = adam.update(jax.grad(loss)(expected), opt_state, expected)
    twice = optax.apply_updates(expected, update)
    state = jax.device_put(jax.tree.map(np.array, state))
    state, _ = script.q_update(state, batch, 1e-2, 0.4, script.dqn_loss, args)
    np.testing.assert_allclose(state.params["w"], expected["w"], atol=1e-6)
    np.testing.assert_array_equal(state.target_params["w"], target["w"])
    state, _ = script.q_update(state, batch, 1e-2, 0.4, script.dqn_loss, args)
    np.testing.assert_allclose(state.params["w"], twice["w"], atol=1e-6)
    np.testing.assert_array_equal(state.target_params["w"], state.params["w"])  # every second update


def test_a_call_of_several_updates_is_several_updates():
    rng, args = np.random.default_rng(0), script.Args(teacher="none")
    params = {"w": rng.normal(size=(24, 3)).astype(np.float32)}
    state = script.QState.create(
        apply_fn=lambda params, obs: obs.reshape(len(obs), -1) / 255.0 @ params["w"],
        params=params, tx=optax.scale_by_adam(eps=1.5e-4), target_params=jax.tree.map(np.copy, params),
    )  # fmt: skip
    obs, next_obs = rng.integers(0, 256, (2, 5, 8, 4, 2, 3), np.uint8)
    reward = rng.normal(size=(2, 5, 8)).astype(np.float32)
    batches = script.Transitions(obs, rng.integers(0, 3, (5, 8)), *reward, next_obs, np.zeros((5, 8, 3), np.float32))
    copies = [jax.device_put(jax.tree.map(np.array, state)) for _ in range(2)]
    one, metrics = script.q_learn(copies[0], batches, 1e-2, 0.0, script.dqn_loss, args)
    other, _ = script.q_updates_in_one_call(copies[1], batches, 1e-2, 0.0, script.dqn_loss, args)
    np.testing.assert_allclose(one.params["w"], other.params["w"], rtol=1e-5)
    assert int(one.step) == 5 and metrics["losses/td_loss"].shape == (5,)


# --- both phases, through main ----------------------------------------------------------------------------------------
@pytest.fixture
def micro(monkeypatch, tmp_path):
    return Micro(script, monkeypatch, tmp_path)


def values(result, kind):
    return action_values(
        result, kind, lambda args, num_actions, *given: script.QNetwork(args["network"], num_actions).apply(*given)
    )


def test_dqn_alone_learns_a_match(micro):
    """Tabula rasa, n = 3: Q of the right action is the number of matches still to come, discounted."""
    result = micro(MatchTheBit, total_timesteps=2400, epsilon_decay_steps=1000)
    assert result["eval_return"] > 2.8
    for time, bit, q in values(result, MatchTheBit):
        assert q.argmax() == bit
        assert q.max() == pytest.approx(sum(GAMMA**k for k in range(3 - time)), abs=0.3)
    epsilon = rows_of(result, "charts/epsilon")
    assert max(epsilon.values()) > 0.9 and epsilon[2400] == pytest.approx(0.01)


def test_a_time_limit_bootstraps(micro):
    """Reward 1 for ever, cut by a time limit: Q = 10. Taken for deaths, the cuts would give less than 5."""
    result = micro(ConstantReward, total_timesteps=4000, learning_rate=3e-3, target_period=20)
    learned = np.mean([q.max() for _, _, q in values(result, ConstantReward)])
    assert 8.5 < learned < 11.5, learned


@pytest.mark.parametrize("kind", ["q", "policy"])
def test_qdagger_learns_offline_from_its_teacher(micro, kind):
    result = micro(MatchTheBit, fake_teacher(kind=kind), offline_steps=300, total_timesteps=0)
    assert result["eval_return"] > 2.8 and result["teacher_score"] > 2.8 and result["global_step"] == 0
    distill_loss = rows_of(result, "losses/distill_loss")
    assert set(distill_loss) == {-200, 0} and distill_loss[0] < distill_loss[-200] / 2


def test_both_phases(micro, monkeypatch):
    """Offline, the switch, and weaning: what the paper's protocol says happens at each."""
    asked, batches, actions, states = [], [], [], []
    policy, transitions, greedy, q_learn = (
        script.Mentor.policy, script.ReplayBuffer.transitions, script.greedy, script.q_learn,
    )  # fmt: skip

    def spy_policy(self, obs):
        asked.append(len(batches))
        return policy(self, obs)

    def spy_transitions(self, *given):
        batches.append(self)
        return transitions(self, *given)

    def spy_greedy(apply_fn, params, obs, key, step, epsilon):
        actions.append((len(obs), float(epsilon)))
        return greedy(apply_fn, params, obs, key, step, epsilon)

    def spy_learn(state, given, learning_rate, weight, *rest):
        states.append((jax.device_get((state.params, state.target_params)), learning_rate, weight))
        return q_learn(state, given, learning_rate, weight, *rest)

    for name, spy in ("greedy", spy_greedy), ("q_learn", spy_learn):
        monkeypatch.setattr(script, name, spy)
    monkeypatch.setattr(script.Mentor, "policy", spy_policy)
    monkeypatch.setattr(script.ReplayBuffer, "transitions", spy_transitions)
    settings = dict(offline_steps=200, total_timesteps=1200, iteration_steps=400, target_period=10**6)
    result = micro(MatchTheBit, fake_teacher(), learning_rate=None, **settings)

    offline = 200 // 50
    assert {id(b) for b in batches[:offline]}.isdisjoint({id(b) for b in batches[offline:]})  # D_T is never used online
    assert batches[offline].written <= 1200 // 4 and len(batches[-1]) == 1200  # only what the student played
    assert [epsilon for n, epsilon in actions if n == 4][0] == pytest.approx(0.01)  # from the first online step
    before, after = states[0][0][0], states[offline - 1][0][0]
    assert not np.allclose(before["params"]["Dense_1"]["kernel"], after["params"]["Dense_1"]["kernel"])
    chex_equal = jax.tree.map(np.array_equal, states[offline][0][0], states[offline][0][1])
    assert all(jax.tree.leaves(chex_equal))  # target <- online at the switch; there was no other occasion

    weights = [(weight, rate) for _, rate, weight in states]
    assert weights[:offline] == [(1.0, 1e-4)] * offline and weights[offline] == (1.0, 1e-4)
    assert weights[-1] == (0.0, 1e-5)  # it plays as well as its teacher, so it is weaned
    first_weaned = next(i for i, (weight, _) in enumerate(weights) if weight == 0)
    assert max(asked) <= first_weaned  # and nobody asks the teacher any more
    assert result["eval_return"] > 2.8
    assert rows_of(result, "charts/distill_weight")[1200] == 0.0


def test_kickstarting_has_no_offline_phase_and_needs_no_data(micro, monkeypatch):
    monkeypatch.setattr(script.Mentor, "complete", None)
    result = micro(MatchTheBit, fake_teacher(), offline_steps=0, total_timesteps=1600, epsilon_decay_steps=400)
    assert result["eval_return"] > 2.8 and min(rows_of(result, "charts/distill_weight")) > 0
    assert rows_of(result, "charts/epsilon")[200] > 0.9  # nothing was learned before, so it explores


def test_a_dqn_teaches_with_its_replay_and_is_fine_tuned(micro, monkeypatch, capsys):
    """--save-replay, then its run folder as --teacher and as --finetune."""
    micro.size = 84
    dqn = micro(MatchTheBit, total_timesteps=1600, epsilon_decay_steps=800, save_replay=True)
    folder = str(dqn["run_dir"])
    loaded = teachers.load_replay(folder, num_actions=2)
    assert len(loaded.action) == 1600 and teachers.load_teacher.__name__ == "<lambda>"
    settings = dict(finetune=folder, teacher=None, learning_starts=40, learning_rate=None)
    tuned = micro(MatchTheBit, total_timesteps=200, **settings)
    assert tuned["eval_return"] > 2.8
    assert set(rows_of(tuned, "charts/learning_rate").values()) == {1e-5}
    monkeypatch.undo()
    micro.play(MatchTheBit)
    settings = SMALL | dict(runs_dir=str(dqn["run_dir"].parent), teacher=folder, offline_steps=300, total_timesteps=0)
    student = script.main(script.Args(**settings | {"collect_steps": 1000}))
    out = capsys.readouterr().out
    assert "1,000 steps from" in out and "it plays" not in out
    assert student["eval_return"] > 2.8 and student["teacher_score"] > 2.8


@pytest.mark.parametrize("protocol", ["dopamine", "classic"])
def test_states_are_rebuilt_as_envpool_showed_them(protocol):
    """Real Breakout, lives and games lost: every state that is acted on is the state that is learned from."""
    args = script.Args(env_id="Breakout-v5", protocol=protocol, max_episode_steps=150)
    env, rng = script.make_game(args, 4, (0,)), np.random.default_rng(0)
    buffer, shown, ends = script.ReplayBuffer(4, 400, (84, 84), 4), [], 0
    obs, _ = env.reset()
    for _ in range(400):
        action = rng.integers(0, 4, 4)
        next_obs, reward, terminated, truncated, game_over, _ = script.step_env(env, action)
        buffer.add(obs, action, reward, terminated, truncated, game_over)
        shown.append(obs)
        ends += (terminated & ~game_over).sum() if protocol == "classic" else truncated.sum()
        obs = next_obs
    assert ends > 3
    env, t = np.nonzero(buffer.starts)
    np.testing.assert_array_equal(buffer.states(env, t), np.stack(shown, 1)[env, t])


# --- resuming ---------------------------------------------------------------------------------------------------------
def test_resume_offline_gives_the_very_same_student(micro, monkeypatch):
    assert threading.current_thread() is threading.main_thread()
    settings = dict(offline_steps=200, total_timesteps=0)
    whole = micro(MatchTheBit, fake_teacher(), **settings)
    undo = interrupt_at(script, monkeypatch, 100)
    part = micro(MatchTheBit, fake_teacher(), **settings)
    undo()
    assert part["global_step"] == -100 and part["eval_return"] is None
    rest = micro(MatchTheBit, fake_teacher(), resume=str(part["run_dir"]), **settings)
    assert rest["global_step"] == 0 and rest["run_dir"] == part["run_dir"]
    jax.tree.map(np.testing.assert_array_equal, params_of(whole), params_of(rest))
    steps = [int(row["global_step"]) for row in csv.DictReader((rest["run_dir"] / "metrics.csv").open())]
    assert steps == sorted(steps)


def test_ctrl_c_in_an_evaluation_saves(micro, monkeypatch):
    play, calls = script.play, []

    def interrupted_play(*given):
        calls.append(0)
        if len(calls) == 2:  # the first is the teacher's
            signal.raise_signal(signal.SIGINT)
        return play(*given)

    monkeypatch.setattr(script, "play", interrupted_play)
    settings = dict(offline_steps=200, total_timesteps=0, iteration_steps=100)
    part = micro(MatchTheBit, fake_teacher(), **settings)
    rest = micro(MatchTheBit, fake_teacher(), resume=str(part["run_dir"]), **settings)
    assert -200 < part["global_step"] < 0 and rest["global_step"] == 0


def test_resume_online_keeps_weight_and_score(micro, monkeypatch, capsys):
    settings = dict(offline_steps=200, total_timesteps=1600, iteration_steps=400, save_replay=True)
    undo = interrupt_at(script, monkeypatch, 450)
    part = micro(MatchTheBit, fake_teacher(), **settings)
    undo()
    assert 0 < part["global_step"] < 1600
    capsys.readouterr()
    rest = micro(MatchTheBit, fake_teacher(), resume=str(part["run_dir"]), **settings)
    out = capsys.readouterr().out
    assert "empty replay online" in out and "is evaluated" not in out  # the teacher is not evaluated again
    assert rest["teacher_score"] == part["teacher_score"] and rest["eval_return"] > 2.8
    weights = rows_of(rest, "charts/distill_weight")
    assert weights[1600] == 0.0 and weights[-200 + 200] == 1.0
    # Killed after the last checkpoint: the replay is lost, the evaluation is made all the same.
    again = micro(MatchTheBit, fake_teacher(), resume=str(part["run_dir"]), **settings)
    assert again["eval_return"] > 2.8 and "nothing to save" in capsys.readouterr().out


# --- bad input --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(gamma=1.5), "--gamma 1.5: must be at least 0 and at most 1"),
        (dict(learning_rate=float("nan")), "--learning-rate nan"),
        (dict(replay_capacity=10**9), "--replay-capacity, --collect-steps: 1,000,000,000 frames take 7,056,000,000,"),
        (dict(collect_steps=10**9), "frames take"),
        (dict(replay_capacity=1000), "--replay-capacity 1000: must be at least --learning-starts"),
        (dict(learning_starts=10), "--learning-starts 10: must be at least 64"),
        (dict(collect_steps=10), "--collect-steps 10: must be at least 64"),
        (dict(finetune="x", teacher="y"), "leave out --teacher or --finetune"),
        (dict(eval_episodes=0), "--eval-episodes 0"),
        (dict(num_envs=6, replay_capacity=20_000), "--replay-capacity 20000: must be at least --learning-starts"),
        (dict(teacher="none", final_learning_rate=1e-5), "--final-learning-rate: is for after a teacher"),
        (dict(teacher="none", teacher_data="x"), "--teacher-data: is for the offline phase"),
        (dict(offline_steps=0, teacher_data="x"), "--teacher-data: is for the offline phase"),
    ],
)
def test_bad_flags(capsys, settings, message):
    refused(capsys, lambda: script.Args(**settings), message)


def test_data_that_nobody_collects_need_no_memory():
    for workflow in dict(offline_steps=0), dict(finetune="x"), dict(teacher="none"):
        script.Args(**workflow, collect_steps=10**9)


def test_bad_teachers(capsys, tmp_path, micro):
    def main(**settings):
        return lambda: script.main(script.Args(**SMALL | dict(runs_dir=str(tmp_path / "runs")) | settings))

    refused(capsys, main(teacher=str(tmp_path / "nothing")), "no such file or folder")
    (tmp_path / "cut").write_bytes(b"\x80")
    refused(capsys, main(teacher=str(tmp_path / "cut")), str(tmp_path / "cut"))
    refused(capsys, main(env_id="Boxing-v5"), "no random and human score")
    refused(capsys, main(env_id="Enduro-v5"), "no bundled teacher")
    refused(capsys, main(env_id="Ant-v4"), "--env-id Ant-v4")
    refused(capsys, main(teacher="none", total_timesteps=0), "--total-timesteps 0: leaves nothing to do")
    refused(capsys, main(total_timesteps=3, save_replay=True), "--save-replay: the offline phase plays nothing to save")
    refused(capsys, main(teacher="none", finetune=str(tmp_path)), "--finetune")
    refused(capsys, main(teacher="none", resume=str(tmp_path)), "--resume")
    assert not (tmp_path / "runs").exists()
    refused(capsys, lambda: micro(MatchTheBit, fake_teacher(right=False)), "a random policy's 1.5; choose another")
    wrong_game = SimpleNamespace(**vars(fake_teacher()) | {"protocol": {"env_id": "Qbert-v5"}})
    refused(capsys, lambda: micro(MatchTheBit, wrong_game), "it learned Qbert-v5, not Pong-v5")


def test_windows_longer_than_the_data(micro, capsys):
    micro.size = 84
    folder = str(micro(MatchTheBit, total_timesteps=400, save_replay=True)["run_dir"])
    long = dict(teacher_data=folder, n_step=500, offline_steps=10, collect_steps=4000, learning_starts=3000)
    refused(capsys, lambda: micro(MatchTheBit, fake_teacher(), **long), "rows hold no window of 500 steps")
    settings = dict(finetune=folder, teacher=None, n_step=101, learning_starts=1000)
    refused(capsys, lambda: micro(MatchTheBit, **settings), "rows hold no window of 101 steps")


def test_fine_tuning_keeps_the_replays_capacity(micro, capsys):
    """Fewer steps of data than --learning-starts: playing fills the rest, then it learns."""
    micro.size = 84
    folder = str(micro(MatchTheBit, total_timesteps=240, save_replay=True)["run_dir"])
    result = micro(MatchTheBit, total_timesteps=240, finetune=folder, teacher=None, learning_starts=400)
    assert "240 steps from" in capsys.readouterr().out and rows_of(result, "losses/td_loss")


def test_another_network_cannot_be_fine_tuned(micro, capsys):
    folder = str(micro(RightAction, total_timesteps=240)["run_dir"])
    other = dict(finetune=folder, teacher=None, network="nature")
    refused(capsys, lambda: micro(RightAction, **other), "--network nature: --finetune")
    other = dict(finetune=folder, teacher=None, protocol="classic")
    refused(capsys, lambda: micro(RightAction, **other), "--protocol classic: --finetune goes on with dopamine")


def test_nan_stops_the_run_and_keeps_the_last_good_checkpoint(micro, monkeypatch, capsys):
    q_learn, calls = script.q_learn, []

    def poisoned(state, batches, *rest):
        calls.append(0)
        if len(calls) > 20:
            batches = batches.replace(n_step_reward=np.full_like(batches.n_step_reward, np.nan))
        return q_learn(state, batches, *rest)

    monkeypatch.setattr(script, "q_learn", poisoned)
    with pytest.raises(SystemExit) as caught:
        micro(RightAction, total_timesteps=2000, log_every=40, checkpoint_every=40)
    err = capsys.readouterr().err
    assert caught.value.code == 1 and "is not finite" in err and "checkpoint.msgpack" in err


def test_args_are_hashable_and_plain():
    hash(script.Args())
    json.dumps(asdict(script.Args()))
