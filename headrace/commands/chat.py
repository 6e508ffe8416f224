"""The chat of `headrace run`: a conversation at a terminal."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable

from headrace.commands.figures import Measured, print_stats
from headrace.commands.talk import Message, Talk
from headrace.commands.terminal import say
from headrace.errors import HeadraceError

try:
    # merely importing it gives input() line editing and a history
    import readline
except ImportError:
    readline = None  # type: ignore[assignment]  # not every Python has it

PROMPT = ">>> "
HELP = """\
/clear         forget the conversation
/system TEXT   set the system message; without TEXT, remove it
/stats         show speed and memory of the last answer
/exit          leave, as Ctrl-D does
Ctrl-C ends an answer. A message that begins with a space is never a command."""

_COMMAND = re.compile(r"/[a-z]+")


class Chat:
    """Reads messages and answers them until the user leaves."""

    def __init__(self, talk: Talk, stats: bool) -> None:
        """`stats`: show figures after every answer."""
        self._talk, self._stats = talk, stats
        self.messages: list[Message] = []
        self._last: Measured | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda rest: say(HELP),
            "/clear": self._clear,
            "/system": self._set_system,
            "/stats": self._show_stats,
        }

    def run(self) -> None:
        say(f"{self._talk.llm.bundle.manifest.name}; /help lists the commands")
        while (line := _read_line()) is not None:
            word, _, rest = line.rstrip().partition(" ")
            if word == "/exit":
                return
            if _COMMAND.fullmatch(word):
                self._commands.get(word, _unknown)(rest.strip())
            elif line.strip():
                self._answer(line.strip())

    def _answer(self, text: str) -> None:
        """Answers a message; what was said by Ctrl-C stays in the conversation."""
        try:
            answer = self._talk.ask(text, self.messages)
        except HeadraceError as error:
            say(f"headrace: {error}")
            return
        measured = None
        with contextlib.suppress(KeyboardInterrupt):
            measured = self._talk.finish(answer, sys.stdout)
        said = answer.completion.text
        if measured is not None or said:
            self.messages += [
                {"role": "user", "content": text},
                {"role": "assistant", "content": said},
            ]
        if measured is not None:
            self._last = measured
            self._talk.print_figures(measured, stats=self._stats)

    def _clear(self, rest: str) -> None:
        self.messages.clear()
        say("the conversation is forgotten")

    def _set_system(self, rest: str) -> None:
        if self._talk.raw:
            say("headrace: raw prompts have no system message")
            return
        self._talk.system = rest or None
        say("the system message is set" if rest else "there is no system message now")

    def _show_stats(self, rest: str) -> None:
        if self._last is None:
            say("there is no finished answer yet")
        else:
            print_stats(self._last, self._talk.llm.engine)


def _unknown(rest: str) -> None:
    say("headrace: no such command; /help lists them")


def _read_line() -> str | None:
    """A line from the user; None when they leave by Ctrl-D, or by Ctrl-C on an empty line."""
    while True:
        try:
            return _input()
        except EOFError:
            say("")
            return None
        except UnicodeDecodeError:
            say("headrace: that was not UTF-8")
        except KeyboardInterrupt:
            say("")
            if not (readline and readline.get_line_buffer()):
                return None


def _input() -> str:
    if sys.stdout.isatty():
        return input(PROMPT)
    # stdout is for answers alone, and input() would write its prompt there
    print(PROMPT, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")
