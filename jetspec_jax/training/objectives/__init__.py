"""What a family of heads learns, one file a family; `training.objective` names what such a file has."""
