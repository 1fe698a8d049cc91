"""The choice of the draft depth: acceptance estimates, step costs, and the controller that uses them."""
