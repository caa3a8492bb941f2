"""Steps beside one device and beside other libraries, messages, and utilization against theory."""
