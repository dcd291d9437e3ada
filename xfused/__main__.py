"""`python -m xfused` checks the installation; `python -m xfused train` is the main job."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

import torch


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def device(text: str) -> torch.device:
    """A device that holds tensors here, for `type=` of an option; the default of every command.

    Raises:
        argparse.ArgumentTypeError: unknown, or not on this machine.
    """
    try:
        probe = torch.empty(1, device=text)  # its device has an index, if there are several
        probe.cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used: {reason}") from None
    return probe.device


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit status: 0, 1 if a check failed, 130 if interrupted. Bad options exit with 2."""
    from . import selfcheck, train

    parser = Parser(
        prog="python -m xfused", description="Without a command: check this installation.", allow_abbrev=False
    )
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    device_help = "where to run (default: %(default)s)"
    parser.add_argument("--device", type=device, default=default_device, help=device_help)
    commands = parser.add_subparsers(dest="command", metavar="{train}")
    trainer = commands.add_parser("train", help=train.SUMMARY, description=train.SUMMARY, allow_abbrev=False)
    trainer.add_argument(
        "--device", type=device, default=argparse.SUPPRESS, help=device_help % {"default": default_device}
    )
    train.add_options(trainer)
    args = parser.parse_args(argv)
    if args.command == "train":
        return train.run(train.Settings.of(args, trainer.error))
    return selfcheck.run(args.device)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
