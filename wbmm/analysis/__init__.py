"""What a model learned, in numbers and pictures: tables, receptive fields, class activation, feature maps, mistakes."""
