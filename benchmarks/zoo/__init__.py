"""A zoo: models that others wrote, unmodified, trained by seven plans each and held against one device in float64.

``make zoo`` installs their packages, proves every model by every plan and writes docs/results/models.md. One file a
family of models; ``entry`` says what a model of the zoo is, ``prove`` what is found of it, ``page`` writes the table.
"""
