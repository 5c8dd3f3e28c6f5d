"""What can be waited for, without I/O: each condition asks for answers and judges them."""
