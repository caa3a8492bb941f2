"""Compilation: model + plan -> CompiledTraining (graph, partition, layouts), before any process is started."""
