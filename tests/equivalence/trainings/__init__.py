"""The trainings that ``same_numbers`` holds against one device, a module for each family of them."""
