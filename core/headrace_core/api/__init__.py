"""The shapes that cross a border: custom resources, HTTP messages, and every name they use."""
