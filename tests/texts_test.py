"""A text ends at its stop token, its stop string or its last token, and keeps nothing after."""

import msgspec
import pytest
from engine_helpers import VOCAB, request

from pdjax.core.events import Emitted
from pdjax.engine.texts import Texts

PIECES = ["<s>", "The", " end", " of", " th", "e", " END", "."]  # token id -> text


def decode(ids) -> str:
    return "".join(PIECES[i] for i in ids)


def texts(**sampling) -> Texts:
    """With one request, 0, whose text is still empty."""
    them = Texts(VOCAB, decode)
    them.add(request(0, [1], **{"max_tokens": 5} | sampling))
    return them


def say(them: Texts, *tokens: int) -> Emitted:
    """A step's tokens, which follow those that the text has."""
    return them.extend(0, len(them[0].tokens), tokens)


def test_tokens_come_out_as_they_go_in():
    them = texts()
    assert say(them, 1, 2) == Emitted(0, (1, 2))
    assert say(them) == Emitted(0, ())
    assert say(them, 3) == Emitted(0, (3,))
    assert them[0].tokens == [1, 2, 3] and not them[0].ended


def test_a_stop_token_is_emitted_and_ends_the_text():
    them = texts(stop_tokens=(7, 5))
    assert say(them, 4, 5, 6, 7) == Emitted(0, (4, 5), stopped=True)
    # Steps that were already on their way bring tokens that never were.
    assert them.extend(0, 2, [1]) == Emitted(0, (), stopped=True)
    assert them.extend(0, 4, [1]) == Emitted(0, (), stopped=True)
    assert them[0].tokens == [4, 5] and them[0].ended


def test_max_tokens_cuts_what_a_step_brings():
    them = texts(max_tokens=3)
    assert say(them, 1, 2) == Emitted(0, (1, 2))
    assert say(them, 3, 4, 5) == Emitted(0, (3,))
    assert say(them, 6) == Emitted(0, ())
    assert not them[0].ended  # by length, which is the scheduler's to say


def test_a_stop_token_in_the_last_place_still_stops():
    them = texts(max_tokens=2, stop_tokens=(7,))
    assert say(them, 1, 7, 7) == Emitted(0, (1, 7), stopped=True)


@pytest.mark.parametrize(
    ("stop", "kept"),
    [
        ((" end",), [1, 2]),  # one token
        ((" the",), [1, 2, 3, 4, 5]),  # two tokens
        (("The end of",), [1, 2, 3]),  # from the first token on
        (("nd o",), [1, 2, 3]),  # from the middle of a token to the middle of another
        (("no", " of"), [1, 2, 3]),  # the second of two
        (("END",), [1, 2, 3, 4, 5, 6]),  # in capitals, unlike " end"
        (("absent",), [1, 2, 3, 4, 5, 6, 7]),
    ],
)
@pytest.mark.parametrize("at_once", [1, 2, 7])
def test_a_stop_string_ends_the_text_wherever_it_lies(stop, kept, at_once):
    them = texts(stop=stop, max_tokens=9)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    out = [them.extend(0, i, tokens[i : i + at_once]) for i in range(0, 7, at_once)]
    assert [token for emitted in out for token in emitted.tokens] == kept
    assert out[-1].stopped == (stop != ("absent",))


# --- What is sampled again -------------------------------------------------------------------


def test_tokens_that_the_client_does_not_have_are_forgotten_and_sampled_again():
    them = texts(stop_tokens=(7,))
    say(them, 1, 2, 7)  # of which the last two got lost with their step
    them.known(0, 1)
    assert them[0].tokens == [1] and not them[0].ended
    assert them.extend(0, 1, [2]) == Emitted(0, (2,))
    assert them.extend(0, 2, [7]) == Emitted(0, (7,), stopped=True)


def test_a_text_that_the_client_knows_stays_as_it_is():
    them = texts(stop_tokens=(7,))
    say(them, 1, 7)
    them.known(0, 2)
    assert them[0].tokens == [1, 7] and them[0].ended


def test_a_step_that_was_given_up_and_still_ends_changes_nothing():
    them = texts()
    say(them, 1, 2, 3)
    assert them.extend(0, 0, [6]) == Emitted(0, (1,))
    assert them.extend(0, 1, [6, 6, 4]) == Emitted(0, (2, 3, 4))
    assert them[0].tokens == [1, 2, 3, 4]


def test_tokens_behind_a_gap_never_were():
    them = texts()
    say(them, 1)
    assert them.extend(0, 3, [2]) == Emitted(0, ())
    assert them[0].tokens == [1]


def test_a_finished_text_keeps_what_its_client_was_told():
    them = texts()
    say(them, 1, 2, 3)
    them.finish(0, 2)
    assert them.extend(0, 2, [3]) == Emitted(0, (), stopped=True)
    assert them[0].tokens == [1, 2]


def test_the_prompt_does_not_stop_a_text():
    them = Texts(VOCAB, decode)
    them.add(request(0, [1, 2, 7], max_tokens=5, stop=(" end",), stop_tokens=(7,)))
    assert say(them, 1) == Emitted(0, (1,))


def test_stop_strings_without_a_tokenizer_are_refused():
    with pytest.raises(ValueError, match=r"request 0 has `stop` strings, but .* `stop_tokens`"):
        Texts(VOCAB).add(request(0, [1], stop=("x",)))
    Texts(VOCAB).add(request(0, [1], stop_tokens=(1,)))


def test_a_request_without_its_tokens_is_refused_with_both_counts():
    bare = msgspec.structs.replace(request(3, [1, 2]), prompt=())
    with pytest.raises(ValueError, match="request 3 says 2 prompt tokens and carries 0"):
        Texts(VOCAB).add(bare)


@pytest.mark.parametrize("token", [VOCAB, -1, 1 << 40])
def test_a_token_that_the_model_does_not_have_is_refused(token):
    said = f"request 3 has the prompt token {token}, but the model's ids go from 0 to 255"
    with pytest.raises(ValueError, match=said):
        Texts(VOCAB).add(request(3, [0, VOCAB - 1, token]))
