"""The one error type that users of HEART meet."""


class HeartError(ValueError):
    """Something the caller can mend; its message is one sentence: what is wrong, its value, what to do."""
