"""The help texts of all options: one table, by record and field.

`featviz COMMAND --help` shows a text up to its form feed, `--help-all` and Python's
documentation all of it. `{MODES}`, `{LAYOUTS}` and `{WEIGHTS}` stand for tables of
folders above this one (`drawing.normalize.with_tables`)."""

from __future__ import annotations

from featviz.records.tables import FORMATS, KINDS, PRESETS, REDUCTIONS

TARGETS = (
    "top1, class:N, class:NAME, box, box:N or box:NAME of a detector, pixel:X,Y of a"
    " segmentation or depth, keypoint:N, sum, mean, norm, output[KEY]:sum|mean|norm,"
    " layer:NAME or layer:NAME:CHANNEL."
)

_LAYERS = (
    "Take layers by class or name, such as Conv2d,ReLU or 'layer1.*'.\f Selectors are"
    " class names, globs, re:REGEX, CLASS@GLOB, fn:FUNCTION, SELECTOR#INDEX, !NOT;"
    " commas separate them."
)
_CHANNELS = (
    "{verb} these channels: 12,40-43, or top:9.\f Choices are top:N (the highest mean),"
    " varied:N (the largest deviation, without the border that padding makes), first:N"
    " and spread:N; a rule without a number chooses 16."
)
_JOBS = "Draw images in N processes, on a CPU."
_NUL_SEPARATED = (
    "Read paths that end with NUL, as `find -print0` writes them, where IMAGE is -."
)
_TENSOR_LAYOUT = (
    "Read tensors in this layout instead of the guessed one: {LAYOUTS}. tokens:14x20+1"
    " is a grid of 14 by 20 tokens behind one other token; tokens:14x20+1,10 has ten"
    " more behind the grid. Repeatable."
)
_TENSORBOARD = (
    "Also write grids and histograms for TensorBoard, into a folder below this one that"
    " is named like --out."
)
_OVERLAY = "Blend each map with the input: 0 shows the input alone, 1 the map alone."
_JUNIT = "Write the verdicts as JUnit XML into this file."
_BATCH_SIZE = "Pass up to N images of one shape through the model together."

_PRESETS = "; ".join(
    f"{name}: {preset.description}" for name, preset in PRESETS.items()
)
_REDUCTIONS = "; ".join(
    f"{name}: {reduction.help}" for name, reduction in REDUCTIONS.items()
)
_FORMATS = "; ".join(
    f"{name}, {format.description}" for name, format in FORMATS.items()
)
_KINDS = ", ".join(kind.help for kind in KINDS.values())

HELP: dict[str, dict[str, str]] = {
    "ModelOptions": {
        "arch": (
            "Build this architecture, such as resnet50 or net.py:Net, for a file of"
            " weights."
        ),
        "weights": "Load these weights: default, none (random) or a file.\f {WEIGHTS}.",
        "seed": "Seed the random numbers of random weights and of noise.",
        "model_args": (
            "Pass this to MODEL's class or function; repeatable.\f A torchvision or timm"
            " name takes arguments, too. @hparams passes the hyper_parameters of a"
            " Lightning checkpoint."
        ),
        "trust": (
            "Trust MODEL, and let code in its file run.\f Classes may be in the current"
            " folder or beside the file."
        ),
        "key": "Take the weights at this key of the checkpoint.",
        "strip_prefix": "Cut this off the beginning of the names of weights.",
        "ema": "Take the averaged (EMA) weights of the checkpoint.",
        "partial": "Load the weights that fit, and leave the others out.",
        "classes": (
            "Name the model's classes by this file.\f It has a name on each line; or it"
            " is JSON or YAML with a list, or with numbers and names."
        ),
        "device": "Run the model on auto, cpu, cuda, cuda:N or mps.",
    },
    "InputOptions": {
        "preset": (
            f"Prepare images for {', '.join(list(PRESETS)[:-1])} or {list(PRESETS)[-1]}."
            f"\f These are: {_PRESETS}."
        ),
        "size": (
            "Resize images to HxW, or their shorter side to N.\f A YOLO makes the longer"
            " side N pixels."
        ),
        "crop": "Crop resized images to NxN or HxW pixels around their centre.",
        "interpolation": "Resize images with this filter.",
        "mean": (
            "Subtract these means from the channels of images, whose values are 0..1."
        ),
        "std": (
            "Divide the channels of images by these standard deviations, after --mean."
        ),
        "input_channels": (
            "Read images as greyscale (1) or RGB (3), or files of N channels "
            "(.npy, .npz, .pt, .tif, or pictures with alpha)."
        ),
        "background": "Put this colour behind transparent images.",
        "frames": (
            "Take N frames of each clip for a video model, or N images of each video"
            " file for another model."
        ),
        "input": (
            "Give the model this tensor in place of an image: randn:1,128 (random"
            " numbers of --seed), zeros:1,128, or a file (.npy, .npz, .pt). NAME is a"
            " parameter of its forward; repeatable."
        ),
        "images_per_pass": (
            "Pass N images to each call of the model, for models that compare "
            "images, as those of optical flow do."
        ),
        "forward_args": (
            "Pass a further argument to the model's forward: a number, true, false,"
            " none, zeros:1,77, ones:1,77:int64, randn:1,9, a file (.npy, .npz, .pt),"
            " or image. NAME.KEY=VALUE fills a dict; repeatable."
        ),
        "transform": (
            "Prepare images with this function, file.py:fn or pkg.mod:fn. It takes a"
            " PIL image or an array, and returns a tensor [C, H, W] or a dict of"
            " arguments of the model."
        ),
    },
    "DrawOptions": {
        "normalize": (
            "Scale values to brightness: map, layer, symmetric, range:LO,HI,"
            " percentile:LO,HI, none.\f Modes are {MODES}; auto is map, for gradients"
            " symmetric-percentile:99, and for class activation maps positive or"
            " symmetric."
        ),
        "cmap": (
            "Colour maps with grey, viridis, coolwarm or another colormap of"
            " matplotlib.\f With auto, maps are grey, and gradients coolwarm."
        ),
        "nrow": "Put N maps in a row; auto makes the picture about square.",
        "padding": "Leave N pixels between maps and around them.",
        "pad_value": (
            "Fill the pixels between maps with this grey, from 0 (black) to 1 (white)."
        ),
        "scale": "Enlarge maps N times; auto enlarges small ones.",
        "channels": _CHANNELS.format(verb="Draw"),
        "max_slices": (
            "Draw at most N slices of each map of a clip, volume or batch: the first of"
            " a batch, else evenly spread ones."
        ),
        "tensor_layout": _TENSOR_LAYOUT,
        "order": (
            "Sort maps by channel (or as --channels has them), by mean (largest first),"
            " or by similarity."
        ),
        "collapse": (
            "Draw maps that correlate by R or more, such as 0.98, as one tile,"
            " marked ×N."
        ),
        "labels": "Write the channel on each map.",
        "marks": (
            "Cross out maps of zeros, strike through other constant maps, and add a"
            " strip of values where all maps are constant."
        ),
        "overlay": _OVERLAY,
        "reduce": f"Draw one picture of all channels. {_REDUCTIONS}.",
        "figure": "Also draw a figure with title, input and colour bar.",
        "format": f"Write pictures in this format: {_FORMATS}.",
        "flat": "Write all pictures of an image into one folder.",
        "tensors": "Also keep the tensors that were drawn, as files of this format.",
    },
    "PassOptions": {
        "capture": f"Draw these tensors of each layer: {_KINDS}.",
        "target": f"Take gradients of {TARGETS}",
        "grad_rule": "Pass gradients back through ReLUs by this rule.",
        "ablate": "Set these channels of the outputs of layers to zero; repeatable.",
        "edit": (
            "Change the outputs of layers, after --ablate: 'conv1:channel 3,5-7*2'"
            " multiplies channels, 'relu:clamp=0,6' limits values, 'conv1:noise=0.1'"
            " adds Gaussian noise, 'layer4:grad*0.5' multiplies gradients; repeatable."
        ),
    },
    "RunOptions": {
        "layers": _LAYERS,
        "out": (
            "Write into this folder.\f With a URL, such as s3://bucket/maps,"
            " the run is written into the folder maps, and copied to the URL."
        ),
        "overwrite": "Replace the run in --out.",
        "resume": "Continue the run in --out where it stopped.",
        "nul_separated": _NUL_SEPARATED,
        "jobs": _JOBS,
        "tensorboard": _TENSORBOARD,
        "shard": (
            "Draw only part I of N parts of the images; all parts may write into one"
            " --out."
        ),
    },
    "LookOptions": {
        "layers": _LAYERS,
        "out": (
            "Write the picture into this PNG file, in place of an earlier picture of"
            " look."
        ),
        "overwrite": "Replace any file in --out.",
        "maps": "Show N maps of each layer.",
        "channels": _CHANNELS.format(verb="Show"),
        "cmap": "Colour maps with this colormap.",
    },
    "CamOptions": {
        "layers": _LAYERS,
        "out": (
            "Write cam-IMAGE.png of each image (with --target cam-IMAGE-TARGET.png)"
            " into this folder; or the picture of one image into this file: .png, .pdf"
            " or .svg."
        ),
        "overwrite": "Replace any file in --out.",
        "nul_separated": _NUL_SEPARATED,
        "target": (
            "Show evidence for this class, box or region, such as class:281,"
            f" class:tabby or box:1.\f Other targets are {TARGETS}"
        ),
        "method": (
            "Make the map by gradcam, gradcam++, layercam or hirescam; xgradcam or"
            " gradxact, which also show what speaks against the target; or rollout or"
            " attention of a transformer."
        ),
        "overlay": _OVERLAY,
        "channels": _CHANNELS.format(verb="Weigh only"),
        "cmap": (
            "Colour maps with auto (turbo; coolwarm for maps with a sign), grey, or a"
            " colormap of matplotlib."
        ),
        "tensor_layout": _TENSOR_LAYOUT,
        "jobs": _JOBS,
    },
    "FieldOptions": {
        "layers": _LAYERS,
        "also": (
            "Measure this model, too, and draw it in the same picture; repeatable.\f"
            " Options such as --weights and --layers hold for all models."
        ),
        "out": (
            "Write the picture into this PNG file, in place of an earlier picture of"
            " field."
        ),
        "overwrite": "Replace any file in --out.",
        "nul_separated": _NUL_SEPARATED,
        "cmap": "Colour receptive fields with this colormap.",
    },
    "ListOptions": {
        "layers": "Mark the layers that these selectors match, as in `featviz run`.",
        "functions": "List the functions that modules call, too.",
        "tree": "Indent modules below their parents.",
    },
    "KernelOptions": {
        "layers": (
            "Draw the convolutions that these selectors match, as in `featviz run`."
        ),
        "out": "Write the pictures into this folder.",
        "overwrite": "Replace the kernels in --out.",
        "all_slices": "Draw a tile for each input channel.",
        "tensorboard": _TENSORBOARD,
    },
    "Thresholds": {
        "eps": "Count values up to E as zero, and values at most E apart as equal.",
        "saturated_at": (
            "Call a channel saturated if more than this share of its values is at a "
            "bound of the activation."
        ),
        "redundant_at": (
            "Call a channel redundant if its correlation with another is above R."
        ),
    },
    "AuditOptions": {
        "layers": _LAYERS,
        "batch_size": _BATCH_SIZE,
        "prove": (
            "Run the images again with the channels that can be cut out set to zero, and"
            " print by how much the output changes."
        ),
        "max_suspects": "Draw at most N channels with a finding.",
        "out": "Write the results into this folder.",
        "overwrite": (
            "Replace the audit in --out, and any files at --junit and --prune-out."
        ),
        "nul_separated": _NUL_SEPARATED,
        "fail_on": (
            "End with exit code 4 if this gate fails: dead>5% of all layers together,"
            " any:dead>5% of some layer, 'layer3.*:constant>2'; repeatable."
        ),
        "baseline": (
            "End with exit code 4 if a layer has more channels of a finding than in"
            " this earlier audit.json."
        ),
        "junit": _JUNIT,
        "prune_out": (
            "Write the channels that can be cut out into this JSON file: {layer: "
            "[channels]}."
        ),
    },
    "ExemplarOptions": {
        "layers": _LAYERS,
        "top": "Show N images of each channel.",
        "channels": (
            "Show these channels: 12,40-43, or top:9.\f Choices are top:N (the"
            " largest values), first:N and spread:N; a rule without a number chooses 16."
        ),
        "rank_by": (
            "Rank images by the largest value of a map, or by its mean.\f The picture"
            " shows what the unit with the largest value sees, or with mean the whole"
            " image."
        ),
        "per_class": (
            "Rank the images of each class apart; the class of an image is the name of "
            "its folder."
        ),
        "batch_size": _BATCH_SIZE,
        "out": "Write the pictures and exemplars.json into this folder.",
        "overwrite": "Replace the exemplars in --out.",
        "nul_separated": _NUL_SEPARATED,
    },
    "DiffThresholds": {
        "tolerance": "Accept relative differences up to T.",
        "max_diff_ratio": (
            "Accept that up to this share of all channels, each counted in each "
            "image, differs, 0..1."
        ),
        "ignore_added": "Accept layers and images that only NEW has.",
        "fail_on": (
            "End with exit code 4 if this gate fails, and not for other differences:"
            " sqnr<20, 'layer4.*:cosine<0.99'; repeatable."
        ),
    },
    "DiffModels": {"layers": _LAYERS},
    "DiffFiles": {
        "out": (
            "Write difference maps, diff.json and the runs of two models into this"
            " folder."
        ),
        "html": "Write an HTML page into this file.",
        "junit": _JUNIT,
        "overwrite": (
            "Replace any file at --html and --junit, and earlier runs of two models."
        ),
    },
    "ReportOptions": {
        "out": (
            "Write the report into this folder, or with --single-file or --zip into"
            " this file."
        ),
        "overwrite": "Replace any file that is in --out.",
        "single_file": "Write one HTML file, with fewer tiles where the run is large.",
        "zip": "Write one zip file of the report and its pictures.",
        "compare": "Show the pictures of this other run beside those of RUN.",
        "kernels": (
            "Show the kernels in this folder, which featviz kernels wrote, with their "
            "channels."
        ),
        "exemplars": (
            "Show the pictures in this folder, which featviz exemplars wrote, with"
            " their channels."
        ),
        "audit": (
            "Show the findings of this audit.json, or of the one in this folder with"
            " the pictures of its suspects."
        ),
    },
    "SheetOptions": {
        "layers": ("Show these layers, by name or class, such as layer2,layer4."),
        "images": (
            "Show these images, by name or glob, such as cat.jpg,'dog*'; repeatable."
        ),
        "channels": (
            "Show these channels: 12,40-43, top:9, varied:9, first:9 or spread:9.\f The"
            " highest mean is at the top; varied:N takes maps that vary much and look"
            " different, without the border that padding makes."
        ),
        "tensor": (
            "Take the tiles from this picture of each layer: its file name without the"
            " ending, such as grad, output.call1 or output.boxes."
        ),
        "reduce": (
            "Draw three principal components of each layer, of all images together, as"
            " red, green and blue.\f The sheet of a run with --reduce shows any other"
            " reduction."
        ),
        "similar_to": (
            "Show over each input how like its places are to this one, such as"
            " cat.jpg@0.41,0.63, from 0 to 1 right and down."
        ),
        "title": "Write this above the figure.",
        "width": "Make the figure N centimetres wide.",
        "dpi": "Draw N pixels to the inch, in all formats but .pdf and .svg.",
        "fps": "Show N pictures in a second of an animation.",
        "out": (
            "Write the figure into this file: .png, .pdf, .svg, or an animation .gif,"
            " .webp, .mp4."
        ),
        "overwrite": "Replace any file in --out; an earlier .png of sheet is replaced anyway.",
    },
}
"""A field without a text is not an option."""
