"""The `mrl` command. Heavy libraries load only for the commands that need them."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mrl.config import Config

_USER_ERRORS = (ValueError, FileNotFoundError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; wrong input ends with one message and status 2, a failed rank with 1."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    # argparse gives up on positionals that follow an option: mrl plan CONFIG --json key=value
    if any(text.startswith("-") for text in rest) or (rest and "overrides" not in arguments):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("mrl").setLevel(logging.INFO)
    try:
        arguments.run(arguments)
    except _USER_ERRORS as error:
        if os.environ.get("RANK", "0") == "0":  # all ranks of a launcher see the same input
            print(f"mrl {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"mrl {arguments.command}: interrupted", file=sys.stderr)
        return 130
    except RuntimeError as error:
        from mrl.workers.group import WorkerError

        if not isinstance(error, WorkerError):
            raise
        # Process edge: the text names the rank, the call and the remote traceback.
        print(f"mrl {arguments.command}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mrl", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(
        name: str, run: Callable[[argparse.Namespace], None], text: str
    ) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    for name, run, text in (
        ("train", _train, "train a policy with GRPO, RLOO or PPO"),
        ("sft", _sft, "train on prompt/response rows: a warm start"),
        ("plan", _plan, "check a config and print what would run, without torch"),
    ):
        command = add(name, run, text)
        command.add_argument("config", help="a YAML file")
        command.add_argument("overrides", nargs="*", metavar="key=value")
        if name == "plan":
            command.add_argument("--json", action="store_true", help="print JSON")
    quickstart = add("quickstart", _quickstart, "the whole way on a laptop: make, warm up, train")
    quickstart.add_argument("overrides", nargs="*", metavar="key=value", help="of the last stage")
    quickstart.add_argument("--config", default="configs/grpo/quickstart.yaml")
    quickstart.add_argument("--seed", type=int, default=1, help="of weights, tasks and sampling")
    return parser


def _plan(arguments: argparse.Namespace) -> None:
    from mrl.config import build_plan, load_config, print_plan

    config = load_config(arguments.config, arguments.overrides)
    plan = build_plan(config)
    if arguments.json:
        print(json.dumps(plan.to_json(), indent=1))
    else:
        print_plan(plan, config)


def _load(arguments: argparse.Namespace) -> Config:
    """Load a config whose files are there and which can be trained."""
    from mrl.config import check_files, check_trainable, load_config

    config = load_config(arguments.config, arguments.overrides)
    check_files(config)
    check_trainable(config)
    return config


def _tokenizer(config: Config) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    path = config.model.tokenizer_path or config.model.path
    return AutoTokenizer.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)


def _train(arguments: argparse.Namespace) -> None:
    from mrl.config import build_plan, print_plan

    config = _load(arguments)
    from mrl.workers.job import serve_as_rank

    if serve_as_rank(config):  # the data and the console are rank 0's
        return
    print_plan(build_plan(config), config)
    from mrl.trainer import RayPPOTrainer

    RayPPOTrainer(config, _tokenizer(config)).fit()


def _sft(arguments: argparse.Namespace) -> None:
    # An optimizer step is a batch of rows: what the config says of rollouts has no part in it.
    fixed = ("actor.ppo_mini_batch_size=${data.train_batch_size}", "algorithm.adv_estimator=grpo")
    arguments.overrides = [*arguments.overrides, *fixed, "rollout.n=1", "actor.ppo_epochs=1"]
    config = _load(arguments)
    from mrl.workers.job import serve_as_rank

    if serve_as_rank(config):
        return
    from mrl.sft import SFTTrainer

    SFTTrainer(config, _tokenizer(config)).fit()


def _quickstart(arguments: argparse.Namespace) -> None:
    from mrl.quickstart.run import run

    run(arguments.config, arguments.seed, arguments.overrides)


if __name__ == "__main__":
    sys.exit(main())
