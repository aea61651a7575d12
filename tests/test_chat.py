"""The interactive conversation: history, commands, Ctrl-C, and messages the engine refuses."""

import io
from types import SimpleNamespace

import pytest

from peagle.acceptance import AcceptanceStats
from peagle.chat import Conversation, run_chat
from peagle.cli import app
from peagle.errors import PeagleError
from peagle.exits import run
from peagle.sampling import SamplingParams
from tests.server.tiny_harmony import dictation, harmony_llm, ids_of


class FakeLLM:
    """Echoes the last message in two pieces; some messages make it fail."""

    def __init__(self):
        self.asked = []
        self.tokenizer = SimpleNamespace(chat_template="", added_tokens_decoder={})

    def chat(self, conversations, params, *, on_delta, marks):
        assert marks is None
        (messages,) = conversations
        self.asked.append([message["content"] for message in messages])
        text = messages[-1]["content"]
        if text == "too long":
            raise PeagleError("prompt 0 has 9000 tokens")
        on_delta(0, "you said ")
        if text == "stop":
            raise KeyboardInterrupt
        on_delta(0, text)
        stats = AcceptanceStats()
        stats.record(2, 3)
        return [SimpleNamespace(token_ids=[1, 2, 3], tokens_per_second=42.0, stats=stats, finish_reason="stop")]


def talk(*lines, piped=False):
    """Run a chat over the given input lines; an exception among them is raised in place of a line."""
    llm, left = FakeLLM(), list(lines)

    def read(prompt):
        assert (prompt == "") == piped
        if not left:
            raise EOFError
        line = left.pop(0)
        if isinstance(line, type):
            raise line
        return line

    llm.refused = run_chat(llm, None, read, piped=piped)
    return llm


def test_history_grows_and_reset_clears_it(capsys):
    llm = talk("one", "  ", "two", "/reset", "three", "/exit", "never")
    assert llm.asked == [["one"], ["one", "you said one", "two"], ["three"]]
    out = capsys.readouterr().out
    assert "you said two" in out
    assert "3 tokens, 42.0 tok/s, acceptance length 3.00" in out


def test_of_a_pipe_the_answers_alone_are_output(capsys):
    assert not talk("one", "", "/help", "/reset", "two", piped=True).refused
    out, err = capsys.readouterr()
    assert out == "you said one\nyou said two\n"
    for said in ("[3 tokens, ", "/reset  start over", "[new conversation]"):
        assert said in err
    assert "Type a message" not in err


def test_of_a_pipe_ctrl_c_in_an_answer_ends_all(capsys):
    with pytest.raises(KeyboardInterrupt):
        talk("one", "stop", "two", piped=True)
    out, err = capsys.readouterr()
    assert out == "you said one\nyou said \n"
    assert "stopped" not in err


@pytest.mark.parametrize("last", [(), ("/exit", "never")])
@pytest.mark.parametrize("message, reason", [("too long", "9000 tokens"), ("bad \udcff", "not valid Unicode text")])
def test_of_a_pipe_a_refused_message_is_said_and_told_at_the_end(capsys, message, reason, last):
    assert talk(message, "two", *last, piped=True).refused
    out, err = capsys.readouterr()
    assert out == "you said two\n"
    assert reason in err
    assert "/reset" not in err


@pytest.mark.parametrize(
    "lines, status, answers, noted",
    [
        (b"one\nstop\ntwo\n", 130, "you said one\nyou said \n", "peagle: interrupted"),
        (b"bad \xff\ntwo\n", 2, "you said two\n", "not valid Unicode text"),
        (b"one\n", 0, "you said one\n", "3 tokens"),
    ],
)
def test_of_a_pipe_the_command_ends_with_a_status(monkeypatch, capsys, lines, status, answers, noted):
    monkeypatch.setattr("peagle.cli._load", lambda *_: FakeLLM())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines), "utf-8", errors="surrogateescape"))
    assert run(app, ["chat", "m"]) == status
    out, err = capsys.readouterr()
    assert out == answers
    assert err.count(noted) == 1


def test_help_lists_the_commands_and_is_no_message(capsys):
    assert talk("/help", "one").asked == [["one"]]
    out = capsys.readouterr().out
    assert all(command in out for command in ("/reset ", "/exit ", "/help "))


def test_ctrl_c_stops_an_answer_and_what_was_said_stays(capsys):
    assert talk("stop", "next").asked[1] == ["stop", "you said ", "next"]
    assert "Ctrl-C again leaves" in capsys.readouterr().out


def test_ctrl_c_at_the_prompt_leaves():
    with pytest.raises(KeyboardInterrupt):
        talk("one", KeyboardInterrupt)


def test_a_refused_message_is_forgotten(capsys):
    llm = talk("one", "too long", "two")
    assert llm.asked[2] == ["one", "you said one", "two"]
    assert not llm.refused
    assert "/reset starts over" in capsys.readouterr().out


def test_conversation_writes_pieces_as_they_come():
    pieces = []
    Conversation(FakeLLM(), None, pieces.append, pieces.append).answer("hi")
    assert pieces[:2] == ["you said ", "hi"]


def test_a_message_that_is_no_unicode_is_not_kept(capsys):
    assert talk("bad \udcff", "next").asked == [["next"]]
    assert "the message is not valid Unicode text" in capsys.readouterr().out


@pytest.mark.parametrize(
    "said, shown, kept",
    [
        (
            "<|channel|>analysis<|message|>hm é<|end|><|start|>assistant<|channel|>final<|message|>hello<|return|>",
            "[thought] hm é\n[answer] hello",
            "hello",
        ),
        ("<|channel|>final<|message|>hello<|return|>", "hello", "hello"),
        ("<|channel|>analysis<|message|>hm", "[thought] hm", ""),
        ("to", "to", "to"),  # that it was no header shows at the end
    ],
)
def test_a_model_with_channels_says_what_is_thought(said, shown, kept):
    pytest.importorskip("xgrammar")
    llm, pieces = harmony_llm(3), []
    params = SamplingParams(max_tokens=200, structured_outputs=dictation(llm.tokenizer, said))
    conversation = Conversation(llm, params, pieces.append, print)
    conversation.answer("hi")
    written = "".join(pieces)
    assert written == shown + "\n"
    assert conversation.messages == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": kept}]


def test_what_ends_an_answer_of_channels_ends_it_in_a_conversation():
    """Also where the model's files name one end of text alone; `ignore_eos` asks for the opposite."""
    llm = harmony_llm(3)
    stops = set(ids_of(llm.tokenizer, "<|return|><|call|>"))
    params = [Conversation(llm, SamplingParams(ignore_eos=ignored), print, print)._params for ignored in (False, True)]
    assert [stops <= set(one.stop_token_ids) for one in params] == [True, False]
