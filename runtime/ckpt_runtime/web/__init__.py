"""The pages that browsers load to show a session: HTML, CSS and modules of JavaScript, without a build step or library.

Text becomes a text node; markup is never parsed, which the browser's policy enforces (``require-trusted-types-for``).
They have no inline code and load nothing from another origin. Addresses are relative, so the pages work below any path.
A field that a Flink cluster lacks may be missing. The pages change nothing but the login.
"""
