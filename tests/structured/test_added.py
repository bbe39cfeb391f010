"""Vocabularies with an adapter's tokens: the engine makes the same from what a grammar carries."""

from support.fake_engine import EOS, VOCAB_SIZE, make_tokenizer

from plait.adapters.info import AddedToken
from plait.structured.added import Vocabularies
from plait.structured.compiler import Compiler
from plait.structured.matcher import MatcherStore
from plait.structured.spec import GrammarKind, GrammarSpec
from plait.structured.vocabulary import Vocabulary

WORD, MARK = VOCAB_SIZE, VOCAB_SIZE + 1
ADDED = (
    AddedToken(token_id=WORD, text="yes!"),
    AddedToken(token_id=MARK, text="<|mark|>", special=True),
)


def extended():
    tokenizer = make_tokenizer()
    return tokenizer, tokenizer.extended(ADDED)


def test_added_tokens_may_be_chosen_and_special_ones_are_no_text():
    tokenizer, other = extended()
    base = Vocabulary.from_tokenizer(tokenizer, width=VOCAB_SIZE, end_ids=[EOS])
    vocabularies = Vocabularies(base)
    wide = vocabularies.of(other, VOCAB_SIZE + 2)
    assert wide.digest == base.with_added(wide.added).digest != base.digest
    assert vocabularies.of(other, VOCAB_SIZE + 2) is wide
    spec = GrammarSpec(kind=GrammarKind.REGEX, content="(yes!|<\\|mark\\|>)")
    matcher = MatcherStore().open(Compiler(wide).compile(spec), wide)
    assert not matcher.copy().accept(MARK)
    assert matcher.accept(WORD)
    assert matcher.can_end


def test_tokens_beyond_the_logits_are_left_out():
    tokenizer, other = extended()
    base = Vocabulary.from_tokenizer(tokenizer, width=VOCAB_SIZE, end_ids=[EOS])
    vocabularies = Vocabularies(base)
    assert vocabularies.of(other) is base
    assert vocabularies.of(tokenizer, VOCAB_SIZE + 2) is base
    assert [token for token, _, _ in vocabularies.of(other, VOCAB_SIZE + 1).added] == [WORD]
