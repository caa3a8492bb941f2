"""The tests of polylane: a folder for each room of ``src/polylane``, and in ``support`` what tests share."""
