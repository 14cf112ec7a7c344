"""Draft families: what turns the features of a target into guesses of its next tokens. One file a family."""
