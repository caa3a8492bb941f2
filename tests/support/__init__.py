"""What tests share: models and graphs to try things on, and what a test states or measures with them."""
