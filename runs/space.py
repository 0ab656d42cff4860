"""The trials of a sweep, from changes in Hydra's own syntax for several values.

    model.lr=0.1,0.01  data.batch_size=choice(32,64)  seed=range(1,4)  model=glob(*)     a grid
    model.lr=tag(log,interval(1e-4,1e-1))  model.width=int(interval(8,64))          to draw from

Optuna, which is not in requirements.txt, is needed to draw trials, not for a grid. It runs in the
process of the sweep alone: ranks get plain values, the same on all.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
import sys
from collections.abc import Sequence
from typing import Any

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException

from runs.config import CONF, check, parse
from runs.refusal import Refusal

OPTUNA = "optuna==5.0.0"


class Space:
    """The values to try: for each change a list, or the interval that they are drawn from.

    Args:
        arguments: the changes, some of them with several values.
        trials: how many to draw; None: all combinations.

    Raises:
        Refusal: for a misspelt key or value, when there is nothing to try, or no Optuna.
    """

    def __init__(self, arguments: list[str], trials: int | None = None) -> None:
        overrides = [parse(argument) for argument in arguments]
        with initialize_config_dir(str(CONF), version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()  # glob() asks it
            for override in overrides:
                override.config_loader = loader
            overrides = list({_key(override): override for override in overrides}.values())
            # By the key as it was written, with its + or ~.
            self.values = {_key(override): _values(override) for override in overrides}
        self.swept = [_key(override) for override in overrides if override.is_sweep_override()]
        self.intervals: dict[str, Any] = {  # of IntervalSweep, whose hints allow no arithmetic
            _key(override): override.value()
            for override in overrides
            if isinstance(override.value(), IntervalSweep)
        }
        if not self.swept:
            raise Refusal(
                "ARGS: nothing to try: give a key several values, as model.lr=0.1,0.01, or with "
                "TRIALS=20 an interval, as model.lr=tag(log,interval(1e-4,1e-1))"
            )
        if trials is None and self.intervals:
            written = f"{next(iter(self.intervals))}=interval(...)"
            raise Refusal(f"{written}: say how many trials to draw, TRIALS=20, or list the values")
        if trials is not None:
            self._check_drawing(trials)
        self._check_values()
        if trials is not None and importlib.util.find_spec("optuna") is None:
            raise Refusal(
                f"TRIALS={trials}: trials are drawn by Optuna, which is missing: "
                f"{sys.executable} -m pip install {OPTUNA}"
            )

    def grid(self) -> list[list[str]]:
        """The changes of each trial: all combinations, the last key's values changing fastest."""
        return [list(trial) for trial in itertools.product(*self.values.values())]

    def draw(
        self, tried: Sequence[tuple[list[str], float | None]], number: int, mode: str
    ) -> list[str]:
        """The changes of trial `number`, drawn where Optuna expects the best by the trials so far.
        If all values are listed, none is drawn twice: another one, at random, takes its place.

        The same is drawn after the same results, so that an interrupted sweep goes on as it would
        have; the first ten draws are random. Optuna's TPE sampler: https://optuna.readthedocs.io.

        Args:
            tried: the changes of each earlier trial and what it gave. None, for no number, counts
                as worse than any, lest more are drawn where training fails.
            number: of the trial, from 1.
            mode: min or max.
        """
        import optuna  # only here: it is not in requirements.txt

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        space = self._distributions()
        sampler = optuna.samplers.TPESampler(seed=number)
        study = optuna.create_study(
            direction="minimize" if mode == "min" else "maximize", sampler=sampler
        )
        for changes, value in tried:
            drawn = {key: self._read(key, changes) for key in space}
            states = optuna.trial.TrialState
            state = states.PRUNED if value is None else states.COMPLETE  # pruned: worse than all
            trial = optuna.trial.create_trial(
                params=drawn, distributions=space, value=value, state=state
            )
            study.add_trial(trial)
        drawn = study.ask(space).params
        proposal = [
            self._write(key, drawn[key]) if key in drawn else self.values[key][0]
            for key in self.values
        ]
        earlier = [changes for changes, _ in tried]
        if proposal in earlier and not self.intervals:
            left = [changes for changes in self.grid() if changes not in earlier]
            return random.Random(number).choice(left)
        return proposal

    def _distributions(self) -> dict[str, Any]:
        import optuna

        space: dict[str, Any] = {}
        for key in self.swept:
            if interval := self.intervals.get(key):
                kind = "Int" if isinstance(interval.start, int) else "Float"
                distribution = getattr(optuna.distributions, f"{kind}Distribution")
                space[key] = distribution(interval.start, interval.end, log="log" in interval.tags)
            else:
                space[key] = optuna.distributions.CategoricalDistribution(self.values[key])
        return space

    def _read(self, key: str, changes: list[str]) -> Any:
        """The value of a key as Optuna knows it."""
        change = changes[list(self.values).index(key)]
        if interval := self.intervals.get(key):
            return type(interval.start)(change.removeprefix(f"{key}="))
        return change

    def _write(self, key: str, drawn: Any) -> str:
        """The change for what Optuna drew: rounded to four digits, but within the interval."""
        interval = self.intervals.get(key)
        if isinstance(drawn, float) and interval:
            drawn = min(max(float(f"{drawn:.4g}"), interval.start), interval.end)
        return f"{key}={drawn}" if interval else drawn

    def _check_drawing(self, trials: int) -> None:
        if not self.intervals and trials > len(self.grid()):
            raise Refusal(
                f"TRIALS={trials}: there are only {len(self.grid())} combinations: leave TRIALS out"
            )
        for key, interval in self.intervals.items():
            if "log" in interval.tags and interval.start <= 0:
                raise Refusal(f"{key}: a logarithmic interval begins above 0")
            if interval.start > interval.end:
                raise Refusal(f"{key}: the interval begins above its end")

    def _check_values(self) -> None:
        """Check each value once, beside the first of all other keys."""
        first = {key: values[0] for key, values in self.values.items()}
        check(list(first.values()))
        for key in self.swept:
            for value in self.values[key][1:]:
                check(list({**first, key: value}.values()))


def _key(override: Override) -> str:
    return str(override.input_line).partition("=")[0]


def _values(override: Override) -> list[str]:
    """Each value as a change of its own; for an interval, its ends."""
    if not override.is_sweep_override():
        return [str(override.input_line)]
    value = override.value()
    if isinstance(value, IntervalSweep):
        values = [str(value.start), str(value.end)]
    else:
        try:
            values = list(override.sweep_string_iterator())
        except HydraException as error:
            raise Refusal(f"{override.input_line}: {str(error).splitlines()[0]}") from None
    if not values:
        raise Refusal(f"{override.input_line}: no value fits")
    return [f"{_key(override)}={each}" for each in dict.fromkeys(values)]
