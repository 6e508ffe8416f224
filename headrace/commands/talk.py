"""One way of talking to a loaded model: how prompts become answers, and answers text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from headrace.commands.figures import Measured, print_logprobs, print_stats, run_measured
from headrace.runtime.answer import Answer
from headrace.runtime.llm import LLM
from headrace.runtime.request import SamplingParams

Message = Mapping[str, str]


@dataclass
class Talk:
    """A model with the settings of a command line."""

    llm: LLM
    params: SamplingParams
    raw: bool = False
    """Prompts go to the model as they are."""
    system: str | None = None
    template: str | None = None
    template_args: Mapping[str, object] = field(default_factory=dict)

    def ask(self, prompt: str, earlier: Sequence[Message] = ()) -> Answer:
        """The answer to a prompt, after the messages before it. Raises as `LLM.chat` does."""
        if self.raw:
            return self.llm.generate(prompt, self.params, stream=True)
        messages = [*earlier, {"role": "user", "content": prompt}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return self.llm.chat(
            messages,
            self.params,
            stream=True,
            template=self.template,
            template_args=self.template_args,
        )

    def pin_system(self) -> int:
        """Pins what all chats begin with; returns the tokens pinned."""
        return self.llm.pin_system(
            self.system, template=self.template, template_args=self.template_args
        )

    def finish(self, answer: Answer, out: TextIO | None = None) -> Measured:
        """Runs an answer to its end; streams its text and a newline to `out` if there is one."""

        def write(text: str) -> None:
            if out is not None:
                out.write(text)
                out.flush()

        with answer:
            try:
                return run_measured(answer, self.llm.backend, write)
            finally:
                write("\n")

    def print_figures(self, measured: Measured, *, stats: bool, logprobs: bool = True) -> None:
        """What was asked for beside the text."""
        if logprobs and measured.completion.logprobs is not None:
            print_logprobs(measured.completion.logprobs)
        if stats:
            print_stats(measured, self.llm.engine)
