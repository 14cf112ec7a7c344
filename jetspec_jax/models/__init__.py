"""Target models. One file a family of models, all made of `layer`."""
