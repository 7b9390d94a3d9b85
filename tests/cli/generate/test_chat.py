# SPDX-License-Identifier: Apache-2.0
"""`flownpu chat`: turns, commands, Ctrl-C; replies from a conversation's cache equal those of a fresh start."""

import contextlib
import io
import itertools
import json
import os
import pty
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from flownpu.generate.conversation import Conversation
from flownpu.generate.language_model import LanguageModel, Sampling, Timing

CPU = ("--device", "cpu")
GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def language_model(model):
    return LanguageModel(model, provider="cpu")


def say(conversation, text, tokens, images=()):
    """The first `tokens` tokens of a reply, which is then cut short."""
    timing = Timing()
    with contextlib.closing(conversation.reply(text, timing, images)) as pieces:
        return "".join(itertools.islice(pieces, tokens)), timing


def fresh(language_model, messages, tokens, images=()):
    """The same reply from a generator that has seen nothing yet."""
    prompt = language_model.tokens_of_messages(messages)
    return "".join(itertools.islice(language_model.complete(prompt, tokens, GREEDY, Timing(), images), tokens))


def test_turn_equals_fresh_start(language_model):
    conversation = Conversation(language_model, GREEDY, 1024, system="Be brief.")
    for number, text in enumerate(["Tell me about loops.", "And of functions?", "Thank you."], start=1):
        before = [*conversation.messages, {"role": "user", "content": text}]
        # Turns are cut short after 12 tokens, as Ctrl-C does: the token generated last is not yet in the KV cache.
        reply, _ = say(conversation, text, 12)
        assert reply == fresh(language_model, before, 12)
        assert conversation.messages == [*before, {"role": "assistant", "content": reply}]
        assert len(conversation.messages) == 1 + 2 * number


@pytest.mark.parametrize("ends", ["by itself", "cut short"])
def test_kv_cache_holds_sequence_after_reply(language_model, ends):
    """After a reply, the logits of further tokens are those of the whole sequence read at once."""
    conversation = Conversation(language_model, GREEDY, 1024)
    say(conversation, "Tell me about loops.", 5 if ends == "cut short" else None)
    held = conversation._cached.generator.get_sequence(0)
    assert len(held) < 1000  # otherwise it has not ended by itself
    longer = np.concatenate([held, np.array([300, 301, 302], dtype=np.int32)])
    generator, new, images = conversation._cached.resume(longer, [])
    assert (new.tolist(), images) == ([300, 301, 302], ())
    generator.append_tokens(new)
    at_once = language_model.generator(1024, GREEDY)
    at_once.append_tokens(longer)
    expected = at_once.get_logits()
    # Sums in another order differ by some 1e-7 of their terms, and may round a bf16 key or value of the cache the other
    # way, by 2^-8 of it. A token that is missing or there twice changes the logits by more than a tenth of their range.
    assert np.abs(generator.get_logits() - expected).max() < 0.02 * np.abs(expected).max()


def test_turn_computes_only_its_own_tokens(language_model):
    conversation = Conversation(language_model, GREEDY, 1024)
    _, first = say(conversation, "word " * 200, 4)
    _, second = say(conversation, "yes", 4)
    assert first.prompt_tokens > 200
    # The end of the reply's turn, the word and the turn's frame; also the reply's last tokens, if its text is tokenised
    # into other tokens than it was generated with.
    assert second.prompt_tokens < 30


def test_turn_without_reply_is_dropped(language_model, monkeypatch):
    conversation = Conversation(language_model, GREEDY, 1024)
    say(conversation, "Tell me about loops.", 4)
    before = list(conversation.messages)

    def interrupted(*_arguments):
        raise KeyboardInterrupt
        yield

    with monkeypatch.context() as patch:
        patch.setattr(language_model, "stream", interrupted)  # Ctrl-C while the prompt is read
        with pytest.raises(KeyboardInterrupt):
            say(conversation, "Tell me about sets.", 4)
    assert conversation.messages == before
    asked = [*before, {"role": "user", "content": "Tell me of sets."}]
    assert say(conversation, "Tell me of sets.", 8)[0] == fresh(language_model, asked, 8)


def test_reset_forgets_all_but_system_message(language_model):
    conversation = Conversation(language_model, GREEDY, 1024, system="Be brief.")
    say(conversation, "Tell me about loops.", 8)
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "Be brief."}]


def test_kv_cache_that_cannot_rewind_is_filled_anew(language_model):
    conversation = Conversation(language_model, GREEDY, 1024)
    say(conversation, "Tell me about loops.", 8)

    class WithoutRewind:
        """Behaves as GenAI's generator on a window-sized cache."""

        def __init__(self, generator):
            self.get_sequence = generator.get_sequence

        def rewind_to(self, length):
            raise RuntimeError(f"Cannot rewind to {length}")

    conversation._cached.generator = WithoutRewind(conversation._cached.generator)
    conversation.messages = [{"role": "user", "content": "Other."}, {"role": "assistant", "content": "Words."}]
    before = [*conversation.messages, {"role": "user", "content": "Tell me of sets."}]
    assert say(conversation, "Tell me of sets.", 8)[0] == fresh(language_model, before, 8)


@pytest.fixture
def chat(flownpu, model, monkeypatch):
    def run(lines, *options):
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return flownpu("chat", model, *CPU, "--temperature", 0, "--context", 120, *options)

    return run


def test_chat_reads_turns_from_pipe(chat):
    done = chat(["What is a tuple?", "", "Thank you."])
    assert done.code == 0
    assert done.err.count("new tokens at") == 2
    assert len(done.out.strip()) > 0


def test_line_without_utf8_does_not_end_chat(start, model):
    process = start("chat", model, *CPU, "--temperature", 0, "--context", 120)
    process.stdin.buffer.write(b"caf\xe9\nWhat is a tuple?\n")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "error: expected a text in UTF-8, got the byte 0xe9 after" in err
    assert err.count("new tokens at") == 1


def test_message_of_several_lines_is_one_turn_and_no_command(chat, tmp_path):
    done = chat(['"""/exit', "is a word.", '  And this?"""', f"/save {tmp_path / 'kept.json'}"])
    assert done.err.count("new tokens at") == 1
    said = json.loads((tmp_path / "kept.json").read_text())["messages"]
    assert said[0] == {"role": "user", "content": "/exit\nis a word.\n  And this?"}


def test_saved_conversation_goes_on_as_it_would_have(chat, tmp_path):
    file = tmp_path / "kept.json"
    whole = chat(["What is a tuple?", "Thank you."], "--system", "Be brief.").out.splitlines()
    chat(["What is a tuple?", f"/save '{file}'"], "--system", "Be brief.")
    done = chat(["/system Be long.", "What is a list?", f"/load {file}", "Thank you.", "/system", f"/save {file}"])
    assert done.out.splitlines()[-1] == whole[-1]
    roles = [message["role"] for message in json.loads(file.read_text())["messages"]]
    assert roles == ["user", "assistant", "user", "assistant"]  # the last /system took the system's turn away


@pytest.mark.parametrize(
    ("command", "text", "error"),
    [
        ("/load", '{"messages": [], "images"', "expected a conversation that /save wrote"),
        ("/load", '{"messages": [{"role": "tool", "content": "x"}], "images": []}', "expected turns of system, user"),
        ("/load", '{"messages": [], "images": ["/nowhere/x.png"]}', "error:"),
        ("/load", None, "cannot be read: No such file"),
        ("/save", None, "expected /save and the path of a file"),
        ("/save /nowhere/x.json", None, "cannot be written: No such file"),
    ],
)
def test_failed_load_or_save_leaves_conversation(chat, tmp_path, command, text, error):
    file = tmp_path / "given.json"
    if text is not None:
        file.write_text(text)
    line = f"/load {file}" if command == "/load" else command
    done = chat(["What is a tuple?", line, f"/save {tmp_path / 'kept.json'}"])
    assert error in done.err
    assert len(json.loads((tmp_path / "kept.json").read_text())["messages"]) == 2


def test_typed_lines_are_there_in_next_conversation(model, tmp_path):
    """On a terminal: the arrow up brings the line before /exit, of the conversation before."""
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path), "TERM": "xterm", "PYTHONUNBUFFERED": "1"}
    script = "import sys; from flownpu.cli import main; sys.exit(main())"
    for keys in ("What is a tuple?\n/exit\n", "\x1b[A\x1b[A\n/exit\n"):
        ours, theirs = pty.openpty()
        command = [sys.executable, "-c", script, "chat", model, *CPU, "--temperature", "0", "--context", "120"]
        process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, text=True, env=environment
        )
        os.close(theirs)
        os.write(ours, keys.encode())
        threading.Thread(target=drain, args=(ours,), daemon=True).start()
        _, err = process.communicate(timeout=60)
        assert err.count("new tokens at") == 1, err
    file = tmp_path / "flownpu" / "chat_history"
    assert file.read_text().splitlines() == ["What is a tuple?", "/exit", "What is a tuple?", "/exit"]
    assert file.stat().st_mode & 0o777 == 0o600


def drain(terminal):
    with contextlib.suppress(OSError):  # the program has ended
        while os.read(terminal, 4096):
            pass


def test_exit_ends_chat_and_unknown_command_is_named(chat):
    done = chat(["/leave", "/exit", "What is a tuple?"])
    assert (done.code, done.out) == (0, "")
    assert "unknown command /leave; /image FILE shows the next message an image, /reset begins a new" in done.err


def test_reset_makes_room_in_full_context(chat):
    question = "What is a tuple? " * 8
    done = chat([question, question, "/reset", question])
    assert done.code == 0
    assert "/reset begins a new one; --context sets a larger one" in done.err
    replies = done.out.splitlines()
    assert done.err.count("new tokens at") == 2
    assert done.out == "\n".join([*replies[: len(replies) // 2]] * 2) + "\n"


def test_ctrl_c_stops_reply_and_not_program(start, model_copy):
    # A reply that ends with the context only: no token is an end of text.
    config = json.loads((model_copy / "genai_config.json").read_text())
    config["model"]["eos_token_id"] = config["model"]["vocab_size"] - 1
    (model_copy / "genai_config.json").write_text(json.dumps(config))
    process = start("chat", model_copy, *CPU, "--temperature", 0)
    process.stdin.write("What is a tuple?\n")
    process.stdin.flush()
    process.stdout.read(20)  # the reply has begun
    process.send_signal(signal.SIGINT)
    _, err = process.communicate("/reset\n", timeout=60)
    assert process.returncode == 0, err
    assert "(stopped)" in err
    assert "A new conversation." in err
    assert "Traceback" not in err


def read_until(stream, words):
    for line in stream:
        if words in line:
            return
    raise AssertionError(f"the program ended and did not say {words!r}")


def test_ctrl_c_at_prompt_shows_how_to_leave(start, model):
    process = start("chat", model, *CPU)
    process.stdin.write("What is a tuple?\n")
    process.stdin.flush()
    read_until(process.stderr, "new tokens at")
    process.send_signal(signal.SIGINT)
    read_until(process.stderr, "/exit or Ctrl-D leaves")
    _, err = process.communicate("What is a list?\n", timeout=60)
    assert process.returncode == 0, err
    assert "new tokens at" in err
