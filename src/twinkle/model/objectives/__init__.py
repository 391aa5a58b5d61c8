"""From token log-probabilities to a loss: named losses, custom ones, and the checks of what a request brings."""
