"""Options, their values and how they may change. Standard library only; reads neither files nor the environment."""
