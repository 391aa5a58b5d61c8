"""Sentences that a text repeats, removed with data_juicer."""

from twinkle_agentic.preprocessor.data_juicer_ops import Operator
from twinkle_agentic.preprocessor.utils import Result, Row, Rows, check_roles, rewrite_rows, rewrite_texts

__all__ = ["RemoveRepeatSentencesFilter"]


class RemoveRepeatSentencesFilter:
    """Removes sentences that stood before in the same text, in the texts of one role; never drops a row.

    lowercase: compare without case. ignore_special_character: compare only letters, digits and Chinese characters.
    It needs data_juicer, whose ``remove_repeat_sentences_mapper`` does the work. That operator also looks at lines of
    code: do not use it for rows with code.
    """

    def __init__(self, lowercase: bool = False, ignore_special_character: bool = True, role: str = "assistant") -> None:
        self.lowercase = lowercase
        self.ignore_special_character = ignore_special_character
        self.role = check_roles("role", [role])[0]
        self._operator = Operator(
            "RemoveRepeatSentencesFilter",
            "mapper.remove_repeat_sentences_mapper",
            "RemoveRepeatSentencesMapper",
            lowercase=lowercase,
            ignore_special_character=ignore_special_character,
        )

    def __call__(self, rows: Rows) -> Result:
        return rewrite_rows(rows, self._rewritten)

    def _rewritten(self, row: Row) -> Row:
        return rewrite_texts(row, [self.role], self._operator.rewrite)
