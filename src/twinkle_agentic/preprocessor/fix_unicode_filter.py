"""Broken Unicode, repaired with data_juicer."""

from twinkle.errors import UnknownNameError
from twinkle_agentic.preprocessor.data_juicer_ops import Operator
from twinkle_agentic.preprocessor.utils import Result, Row, Rows, check_roles, rewrite_rows, rewrite_texts

__all__ = ["FixUnicodeFilter"]

_FORMS = ("NFC", "NFD", "NFKC", "NFKD")


class FixUnicodeFilter:
    """Repairs wrongly decoded characters and normalizes Unicode in the texts of one role; never drops a row.

    It needs data_juicer, whose ``fix_unicode_mapper`` does the work.
    """

    def __init__(self, normalization: str = "NFC", role: str = "assistant") -> None:
        if not isinstance(normalization, str) or normalization.upper() not in _FORMS:
            raise UnknownNameError("normalization", str(normalization), _FORMS)
        self.normalization = normalization.upper()
        self.role = check_roles("role", [role])[0]
        self._operator = Operator(
            "FixUnicodeFilter",
            "mapper.fix_unicode_mapper",
            "FixUnicodeMapper",
            ["ftfy"],
            normalization=self.normalization,
        )

    def __call__(self, rows: Rows) -> Result:
        return rewrite_rows(rows, self._rewritten)

    def _rewritten(self, row: Row) -> Row:
        return rewrite_texts(row, [self.role], self._operator.rewrite)
