"""What went wrong for a reason that lies with the input."""


class UserError(ValueError):
    """Input that cannot be used. The message is one line; the command line prints it and ends with exit status 2."""
