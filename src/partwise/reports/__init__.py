"""What can be told of a task without training it: parameters, settings, heat, costs of serving."""
