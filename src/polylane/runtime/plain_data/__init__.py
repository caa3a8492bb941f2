"""Plain data: values that workers send each other, as bytes that are never unpickled."""
