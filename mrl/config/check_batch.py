"""Rules of the batch arithmetic: what must divide, and the nearest numbers that do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import ceil, gcd, lcm

from mrl.config.errors import Violation
from mrl.config.roles import RoleSettings, enabled_roles, trainer_ranks
from mrl.config.schema import Config

_TRAIN = "data.train_batch_size"


def check_batch(config: Config) -> Iterator[Violation]:
    """Check prompts, mini-batches and micro-batches of every role with a legal layout."""
    world = len(trainer_ranks(config))
    roles = [r for r in enabled_roles(config) if world % r.ranks_a_replica == 0]
    trained = [r for r in roles if r.trained]
    for key in dict.fromkeys(r.keys["mini"] for r in trained):
        yield from _check_mini(config, [r for r in trained if r.keys["mini"] == key])
    for role in trained:
        if not role.dynamic:
            yield from _check_micro(config, role)
    for role in roles:
        if not role.log_prob_dynamic:
            yield from _check_log_prob_micro(config, role)


def _dp(config: Config, role: RoleSettings) -> int:
    return len(trainer_ranks(config)) // role.ranks_a_replica


def _check_mini(config: Config, roles: Sequence[RoleSettings]) -> Iterator[Violation]:
    """Check one mini-batch key for the roles that it serves."""
    train, n = config.data.train_batch_size, config.rollout.n
    key, mini = roles[0].keys["mini"], roles[0].mini
    # Prompts that give every data-parallel rank of every role a whole number of samples.
    step = lcm(*(dp // gcd(n, dp) for dp in (_dp(config, r) for r in roles)))
    if train == mini:
        yield from _check_over_dp(config, roles, f"{_TRAIN} and {key}", mini, step)
        return
    if train % mini:
        minis = _around(mini, (d for d in _divisors(train) if d % step == 0))
        trains = _around(train, _multiples(lcm(mini, step), train))
        legal = [f"{key} {_either(minis)}"] if minis else []
        if mini % step == 0:
            legal.append(f"{_TRAIN} {_either(trains)}")
        yield Violation(
            key,
            mini,
            f"must divide {_TRAIN}={train} into whole optimizer steps",
            " or ".join(legal),
        )
        yield from _check_over_dp(config, roles, _TRAIN, train, step)
    yield from _check_over_dp(config, roles, key, mini, step)


def _check_over_dp(
    config: Config, roles: Sequence[RoleSettings], key: str, prompts: int, step: int
) -> Iterator[Violation]:
    if prompts % step == 0:
        return
    train, mini, n = config.data.train_batch_size, roles[0].mini, config.rollout.n
    samples = prompts * n
    failing = [r for r in roles if samples % _dp(config, r)]
    shares = " and ".join(
        f"dp {dp} of the {' and the '.join(r.name for r in failing if _dp(config, r) == dp)} "
        f"({samples / dp:.4g} a rank)"
        for dp in dict.fromkeys(_dp(config, r) for r in failing)
    )
    legal = _around(prompts, _multiples(step, prompts))
    nearest = _either(legal)
    if prompts == mini and train != mini and train % mini == 0:
        inside = _around(mini, (d for d in _divisors(train) if d % step == 0))
        together = _either([value * (train // mini) for value in legal])
        nearest = _either(inside) if inside else f"{nearest} with {_TRAIN} {together}"
        legal = inside or legal
    yield Violation(
        key,
        prompts,
        f"{prompts} prompts x rollout.n {n} = {samples} samples do not divide over {shares}",
        nearest + _micro_note(config, failing, legal),
    )


def _micro_note(config: Config, roles: Iterable[RoleSettings], legal: Sequence[int]) -> str:
    """Tell when the micro-batch size has to change with the proposed numbers."""
    notes = []
    for role in roles:
        shares = [value * config.rollout.n // _dp(config, role) for value in legal]
        if not role.dynamic and role.micro and any(share % role.micro for share in shares):
            notes.append(
                f"{role.keys['micro']}={role.micro} must then divide the "
                f"{_either(shares)} samples of a rank"
            )
    return f" ({'; '.join(dict.fromkeys(notes))})" if notes else ""


def _check_micro(config: Config, role: RoleSettings) -> Iterator[Violation]:
    key, dp = role.keys["micro"], _dp(config, role)
    if role.micro is None:
        yield _size_needed(key, role.keys["dynamic"])
        return
    samples = role.mini * config.rollout.n
    if samples % dp:
        return  # told by the rule on mini-batches
    share = samples // dp
    if share % role.micro:
        yield Violation(
            key,
            role.micro,
            f"must divide the samples of a rank: {role.keys['mini']}={role.mini} x rollout.n "
            f"{config.rollout.n} / the {role.name}'s dp {dp} = {share}",
            _either(_around(role.micro, _divisors(share))),
        )
        return
    yield from _check_interleaving(role, key, role.micro, share, "micro-batches")


def _check_log_prob_micro(config: Config, role: RoleSettings) -> Iterator[Violation]:
    key, size = role.keys["log_prob_micro"], role.log_prob_micro
    if size is None:
        yield _size_needed(key, role.keys["log_prob_dynamic"])
        return
    share = ceil(config.data.train_batch_size * config.rollout.n / _dp(config, role))
    yield from _check_interleaving(role, key, size, share, "forward passes over the rollout")


def _check_interleaving(
    role: RoleSettings, key: str, size: int, share: int, what: str
) -> Iterator[Violation]:
    """Hold Megatron's rule for interleaved pipelines: whole rounds of micro-batches."""
    pp = role.megatron.pipeline_model_parallel_size
    vpp = role.megatron.virtual_pipeline_model_parallel_size
    count = ceil(share / size)
    if vpp is None or vpp == 1 or count % pp == 0:
        return
    legal = [s for s in range(1, share + 1) if ceil(share / s) % pp == 0]
    if what == "micro-batches":
        legal = [s for s in legal if share % s == 0]
    yield Violation(
        key,
        size,
        f"gives {count} {what} on a rank of the {role.name}; with "
        f"virtual_pipeline_model_parallel_size {vpp} it must be a multiple of "
        f"pipeline_model_parallel_size {pp}",
        _either(_around(size, legal)),
    )


def _size_needed(key: str, switch: str) -> Violation:
    return Violation(key, None, f"is needed unless {switch}=true", f"1, or {switch}=true")


def _divisors(number: int) -> list[int]:
    low = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def _multiples(step: int, near: int) -> list[int]:
    below = near // step * step
    return [value for value in (below, below + step) if value > 0]


def _around(value: int, legal: Iterable[int]) -> list[int]:
    """Pick the legal number on either side of a value, or the value itself."""
    numbers = sorted(legal)
    if value in numbers:
        return [value]
    return [n for n in numbers if n < value][-1:] + [n for n in numbers if n > value][:1]


def _either(numbers: Iterable[int]) -> str:
    return " and ".join(str(number) for number in numbers)
