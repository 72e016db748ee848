"""Whether the tokenizer files that go into a checkpoint make a tokenizer of its model.

Loads them as an engine will, before hours of work are built on them. It knows nothing of weights. Invariant: a
tokenizer that passes loads in the engine, the ids of its model are rows of the embedding, and who builds is told where
answers end and why the model cannot chat, if so.
"""

from __future__ import annotations

from pathlib import Path

from wicore_trt.errors import CheckpointError, EngineFormatError, shown
from wicore_trt.text.tokenizer import Tokenizer


def check_tokenizer(directory: Path, source: str, vocab_size: int) -> list[str]:
    """Check the files of `directory`, which come from `source`, against an embedding of `vocab_size` rows. Without a
    tokenizer.json there is nothing to check. Returns sentences that the user should know. Raises CheckpointError in
    terms of the source."""
    if not (directory / "tokenizer.json").is_file():
        return []
    try:
        tokenizer = Tokenizer.from_dir(directory)
    except EngineFormatError as error:
        message = error.message.replace(str(directory), source)
        raise CheckpointError(message, fix="Download the model's tokenizer files again.") from error
    ids = {i for i in (*tokenizer.eos_ids, tokenizer.bos_id, tokenizer.model_size - 1) if i is not None}
    if max(ids) >= vocab_size:
        raise CheckpointError(
            f"{source}: its tokenizer has the id {max(ids)}, but the model has {vocab_size} tokens.",
            fix="Take tokenizer and weights from the same model.",
        )
    notes = [f"answers end at {tokenizer.described_ends()}.", *filter(None, (tokenizer.chat_note,))]
    notes += tokenizer.chat_doubts()
    beyond = range(vocab_size, tokenizer.vocab_size)
    if not beyond:
        return notes
    tokens = f"{len(beyond)} added token{'s' if len(beyond) > 1 else ''} beyond the model's {vocab_size} rows"
    first = shown(tokenizer.decode(beyond[:1], skip_special=False))
    return [*notes, f"the tokenizer has {tokens}, from {first} on; text that holds one is refused."]
