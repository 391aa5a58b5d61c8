"""Texts with few or many tokens, counted with data_juicer."""

from os import PathLike

from twinkle.errors import InvalidInputError
from twinkle_agentic.preprocessor.data_juicer_ops import Operator
from twinkle_agentic.preprocessor.utils import Result, Row, Rows, check_roles, drop_rows, joined_text

__all__ = ["TokenNumFilter"]


class TokenNumFilter:
    """Drops rows in which the texts of one role have fewer or more tokens than allowed (token_count_out_of_range).

    hf_tokenizer: a model on Hugging Face, or a local directory, whose tokenizer counts. min_num, max_num: both are
    allowed themselves. It needs data_juicer, whose ``token_num_filter`` does the work.
    """

    def __init__(
        self,
        hf_tokenizer: str | PathLike[str] = "Qwen/Qwen2.5-0.5B",
        min_num: int = 10,
        max_num: int = 8192,
        role: str = "assistant",
    ) -> None:
        if min_num > max_num:
            raise InvalidInputError("min_num", min_num, f"a number of tokens up to max_num, {max_num}")
        self.hf_tokenizer = str(hf_tokenizer)
        self.min_num = min_num
        self.max_num = max_num
        self.role = check_roles("role", [role])[0]
        self._operator = Operator(
            "TokenNumFilter",
            "filter.token_num_filter",
            "TokenNumFilter",
            ["transformers"],
            hf_tokenizer=self.hf_tokenizer,
            min_num=min_num,
            max_num=max_num,
        )

    def __call__(self, rows: Rows) -> Result:
        return drop_rows(rows, self._reason)

    def _reason(self, row: Row) -> str | None:
        return None if self._operator.keeps(joined_text(row, self.role)) else "token_count_out_of_range"
