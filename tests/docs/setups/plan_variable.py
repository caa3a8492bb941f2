import os

os.environ["POLYLANE_PLAN"] = "data=1"
