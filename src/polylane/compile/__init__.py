"""Model + plan -> CompiledTraining: graph, partition, layouts; no process is started."""
